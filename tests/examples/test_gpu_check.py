"""The checks for a GPU, run on the CPU: every line of them is known to work before one is at hand."""

import subprocess
import sys
from pathlib import Path

import pytest

from parity.matrix_runs import WHOLE_TABLE

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPT = BENCHMARKS / "gpu_check.py"


@pytest.fixture
def rows(monkeypatch):
    """The module that judges numbers."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    from gpu_checks import rows

    return rows


def started(*arguments, **options):
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, **options)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(240)
@pytest.mark.skipif(not WHOLE_TABLE, reason="`make test-extended` runs it")
def test_every_kind_of_check_runs_and_is_right_on_the_cpu():
    done = started("--device", "cpu", "--quick", timeout=230)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    for name in (
        "fp32 response-task",
        "fp32 holistic-narrow-task",
        "fp32 blockwise-narrow",
        "bf16 response-task",
        "overlap response-task",
        "LoRA student",
        "ddp response-task",
        "sharded teacher, one rank",
        "fsdp response-task",
        "dedicated pp response-task",
        "response step time / by hand",
    ):
        assert any(line.startswith(f"{name} ") and " ok " in line for line in lines), f"{name}:\n{done.stdout}"
    assert "WRONG" not in done.stdout.replace("0 WRONG", "") and "0 FAILED on cpu" in done.stdout


def test_without_an_accelerator_one_sentence_says_so():
    done = started("--quick", timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert "needs an accelerator, and torch" in done.stderr and "make gpu-check DEVICE=cpu" in done.stderr


@pytest.mark.parametrize(
    ("value", "limit", "status"),
    [(0.9, 1.0, "ok"), (1.1, 1.0, "WRONG"), (float("nan"), 1.0, "WRONG"), (float("nan"), None, "ok")],
)
def test_numbers_are_held_against_their_limit(rows, tmp_path, value, limit, status):
    rows.run_checks([("a", lambda: rows.Found(value, limit))], tmp_path / "rows")
    assert [row.status for row in rows.read_rows(tmp_path / "rows")] == [status]


def test_a_check_that_fails_or_is_skipped_does_not_keep_the_others_from_running(rows, tmp_path):
    def skipped():
        raise rows.Skipped("no such package")

    rows.run_checks([("a", lambda: 1 / 0), ("b", skipped), ("c", lambda: rows.Found(1.0))], tmp_path / "rows")
    found = rows.read_rows(tmp_path / "rows")
    assert [row.status for row in found] == ["FAILED", "skipped", "ok"]
    assert "ZeroDivisionError" in found[0].note and found[1].note == "no such package"
    assert "no such package" in rows.table(found)
