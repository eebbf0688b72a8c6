"""The launcher of the rank tests leaves no process behind."""

import os
import subprocess
import sys

import psutil
import pytest

from support.ranks import MARK, end, torchrun

# A worker in a process group of its own, as torchrun makes them, that does not listen when asked to end.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""

ONE_RANK_FAILS = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
other = pathlib.Path(sys.argv[1], "0")
while not (other.exists() and other.read_text()):
    time.sleep(0.05)
if os.environ["RANK"] == "1":
    raise SystemExit("this rank gives up")
time.sleep(600)
"""


def test_end_reaches_processes_in_other_groups(monkeypatch):
    monkeypatch.setattr("support.ranks.GRACE", 0.5)
    environment = {**os.environ, MARK: "a test of the launcher"}
    command = [sys.executable, "-c", STUBBORN]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        child = psutil.Process(int(process.stdout.readline()))
        assert child.is_running()
        end("another run")
        assert process.poll() is None
        end("a test of the launcher")
        process.wait(10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


@pytest.mark.multiprocess
def test_a_failing_rank_ends_all_and_its_words_are_in_the_message(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(ONE_RANK_FAILS)
    with pytest.raises(AssertionError, match=r"program\.py on 2 ranks ended with 1:(.|\n)*this rank gives up"):
        torchrun(program, [tmp_path], log=tmp_path / "log.txt", timeout=100)
    assert not any(psutil.pid_exists(int((tmp_path / rank).read_text())) for rank in "01")
