"""Memory that one step frees is there for the next."""

import platform
import subprocess
import sys

import pytest

from silverspoon_kd.training import trainer
from support.distil import make

STEPS = """
import resource, sys
from silverspoon_kd.host_memory import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

if sys.argv[1] == "kept":
    keep_freed_memory()
before = 0
for step in range(12):
    if step == 2:
        before = faults()
    activations = [b"x" * 2**20 for _ in range(40)]
    del activations
print((faults() - before) / 10)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="is about glibc")
def test_steps_do_not_ask_for_their_memory_again():
    def faults(way: str) -> float:
        command = [sys.executable, "-c", STEPS, way]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    pages = 40 * 2**20 / 4096
    assert faults("left alone") > 0.9 * pages
    assert faults("kept") < 0.01 * pages


def test_training_on_a_cpu_keeps_it(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(trainer, "keep_freed_memory", lambda: calls.append("kept"))
    distiller = make("response", tmp_path, max_steps=1, report_to="none")
    assert calls == []
    distiller.train()
    assert calls == ["kept"]
