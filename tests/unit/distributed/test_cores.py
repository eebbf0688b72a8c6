"""CPU slots are cores: the student stays on its own."""

import json
import os
import subprocess
import sys

import pytest

from silverspoon_kd.distributed import TeacherPlacement, setup_split_gpu
from silverspoon_kd.distributed.split_gpu import SPLIT_VARIABLE, require_split_done

CORES = sorted(os.sched_getaffinity(0))
pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="one core cannot be divided")
LAST = TeacherPlacement([len(CORES) - 1], device_type="cpu")


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    monkeypatch.delenv("SILVERSPOON_CPU_SLOTS", raising=False)
    monkeypatch.setenv(SPLIT_VARIABLE, "null")


def test_the_student_stays_on_the_cores_of_its_slots():
    setup_split_gpu(LAST)
    assert sorted(os.sched_getaffinity(0)) == CORES[:-1]
    assert require_split_done(LAST).cores == tuple(CORES)
    setup_split_gpu(LAST)
    assert sorted(os.sched_getaffinity(0)) == CORES[:-1]


def test_another_split_starts_from_all_cores():
    setup_split_gpu(LAST)
    setup_split_gpu(TeacherPlacement([0], device_type="cpu"))
    assert sorted(os.sched_getaffinity(0)) == CORES[1:]


def test_counted_slots_are_no_cores(monkeypatch):
    monkeypatch.setenv("SILVERSPOON_CPU_SLOTS", "4")
    setup_split_gpu(TeacherPlacement([3], device_type="cpu"))
    assert sorted(os.sched_getaffinity(0)) == CORES
    assert require_split_done(TeacherPlacement([3], device_type="cpu")).cores == ()


def test_a_child_keeps_the_split_of_its_parent():
    setup_split_gpu(LAST)
    text = (
        "import json, os; from silverspoon_kd.distributed import TeacherPlacement, setup_split_gpu; "
        "from silverspoon_kd.distributed.split_gpu import require_split_done; "
        f"p = TeacherPlacement({LAST.teacher_only_devices}, device_type='cpu'); setup_split_gpu(p); "
        "print(json.dumps([sorted(os.sched_getaffinity(0)), require_split_done(p).cores]))"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [CORES[:-1], CORES]
