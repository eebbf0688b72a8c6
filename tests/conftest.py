"""What every test starts from: one thread, no network, the same random numbers, a clean environment afterwards."""

import gc
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

# Before anything imports torch. Two ranks on two cores with two threads each would fight for the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")
for _name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
    os.environ[_name] = "1"

# Processes that a test starts import this checkout and tests/support too, installed or not.
_TESTS = Path(__file__).resolve().parent
_PATHS = [str(_TESTS.parent / "src"), str(_TESTS)]
os.environ["PYTHONPATH"] = os.pathsep.join([*_PATHS, *filter(None, [os.environ.get("PYTHONPATH")])])

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

# No deadline: a shared machine makes single examples slow. Derandomized: a red run must be red again.
settings.register_profile("silverspoon", deadline=None, derandomize=True, max_examples=30)
settings.load_profile("silverspoon")


# What `make test-fast` leaves out: whole runs that are compared with other whole runs.
_SLOW = (
    "parity/",
    "simdev/",
    *(f"unit/training/test_{name}.py" for name in ("activation_checkpointing", "checkpoints", "economy", "evaluation")),
    *(f"unit/training/test_{name}.py" for name in ("lora", "positions_of_losses", "rates", "resume")),
    *(f"unit/training/test_{name}.py" for name in ("alignment_kinds", "fused_losses", "wrapped_students")),
    "unit/losses/test_logit_memory.py",
    *(f"unit/teacher/test_{name}.py" for name in ("hygiene", "self_placed")),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the slow folders and files."""
    for item in items:
        if item.path.relative_to(_TESTS).as_posix().startswith(_SLOW):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Take what importing made out of every later collection; the Trainer collects garbage in each run."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _all_cores() -> Iterator[None]:
    """A split of CPU slots keeps its process on the student's cores."""
    cores = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, cores)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _environment_as_before() -> Iterator[None]:
    """Undo what a test left in the environment: accelerate exports its own variables and never takes them back."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)
