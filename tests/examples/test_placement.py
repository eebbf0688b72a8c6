"""The distributed examples, started as their first line says; all of them give the same losses."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from parity.matrix_runs import WHOLE_TABLE

FOLDER = Path(__file__).parents[2] / "examples" / "distributed"
THREE = "three_student_ranks.py"
pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def run_example(name: str, folder: Path, ranks: int = 2) -> list[float]:
    """Start an example on its ranks, with four CPU slots, and return the losses it printed."""
    words = ast.get_docstring(ast.parse((FOLDER / name).read_text())).split(": ")[1].split()
    assert words == ["torchrun", "--nproc_per_node=3" if name == THREE else "--nproc_per_node=2", name]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [*start, str(FOLDER / name)]
    environment = {**os.environ, "SILVERSPOON_CPU_SLOTS": "4", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, f"{done.stderr[:6000]}\n...\n{done.stderr[-1000:]}"
    return [float(value) for value in re.findall(r"^\{'loss': '([0-9.e+-]+)'", done.stdout, re.MULTILINE)]


@pytest.fixture(scope="module")
def replicated(tmp_path_factory):
    return run_example("replicated.py", tmp_path_factory.mktemp("replicated"))


EXTENDED = pytest.mark.skipif(not WHOLE_TABLE, reason="make test-extended runs it")
ALL = [
    "full_example.py",
    "dedicated_tp.py",
    "sharded.py",
    "dedicated_pp.py",
    "dedicated_sharded.py",
    "overlap.py",
    "student_fsdp.py",
    "student_deepspeed.py",
]


def test_every_example_is_among_them():
    assert {path.name for path in FOLDER.glob("*.py")} == {"your_data.py", "replicated.py", THREE, *ALL}


@EXTENDED
@pytest.mark.parametrize("name", ALL)
def test_placements_give_the_same_losses(name, replicated, tmp_path):
    assert len(replicated) == 4
    assert run_example(name, tmp_path) == pytest.approx(replicated, rel=1e-3)
    assert not list(Path("/dev/shm").glob("*silverspoon*"))


@EXTENDED
def test_three_student_ranks_give_the_losses_of_three_with_copies(tmp_path):
    wanted = run_example("replicated.py", tmp_path, ranks=3)
    assert len(wanted) == 4
    assert run_example(THREE, tmp_path, ranks=3) == pytest.approx(wanted, rel=1e-3)
