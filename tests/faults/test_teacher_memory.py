"""A teacher in processes of its own is in memory once, however many students there are."""

import json
from pathlib import Path

import pytest

from parity.matrix_runs import WHOLE_TABLE
from support import ranks
from support.tiny import qwen3

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.alone]

PROGRAM = Path(ranks.__file__).parent / "dedicated_memory.py"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny model, a model of 170 MB, and its size in bytes."""
    folder = tmp_path_factory.mktemp("models")
    large = qwen3(hidden=1024, layers=4, intermediate_size=3584)
    large.save_pretrained(folder / "large")
    qwen3(layers=2).save_pretrained(folder / "tiny")
    return folder / "tiny", folder / "large", sum(each.numel() * each.element_size() for each in large.parameters())


@pytest.mark.parametrize("num_ranks", [1, 2, 4] if WHOLE_TABLE else [2])
def test_b_13_one_copy_for_all_ranks(num_ranks, folders, tmp_path, monkeypatch):
    tiny, large, nbytes = folders
    monkeypatch.setenv("SILVERSPOON_CPU_SLOTS", "6")
    ranks.torchrun(PROGRAM, [tmp_path, large, tiny], log=tmp_path / "log.txt", num_ranks=num_ranks, timeout=110)
    report = json.loads((tmp_path / "report.json").read_text())

    def above(name, *parts):
        return sum(report[name][part] - report["tiny"][part] for part in parts) / nbytes

    for name in ("folder", "module"):
        assert 0.9 < above(name, "student", "teacher") < 1.15
    # By its path no student ever loads it, and nowhere are there two copies of it at the same time.
    assert above("folder", "student") < 0.1
    assert above("folder", "peak") < 1.2
    # A module's one copy is a file in memory. Sizes that processes share, taken one after the other while they come and
    # go, do not add up; what no other process has does.
    assert above("module", "anonymous") < 0.2
