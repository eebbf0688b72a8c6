"""Losses without logits on two ranks: the numbers of the dense way, there and in one process."""

from pathlib import Path

import pytest
import torch

from parity.cases import MOVED
from parity.runs import identical, relative
from silverspoon_kd.training.fused import FUSED
from support import fused_ranks
from support.fused_ranks import CASES, MODES
from support.ranks import started

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fused")
    log = folder / "log"
    variables = {"DS_ACCELERATOR": "cpu"}
    with started(Path(fused_ranks.__file__), [folder], log=log, num_ranks=2, variables=variables, fork=True) as (
        launcher,
        _,
    ):
        assert launcher.wait(110) == 0, log.read_text()[-6000:]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


def agree(found, expected, rel):
    assert relative(expected["after"], expected["before"]) > MOVED
    assert relative(found["after"], expected["after"]) < rel
    for one, other in zip(found["logs"], expected["logs"], strict=True):
        assert one == pytest.approx(other, rel=2 * rel)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", MODES)
def test_the_numbers_are_those_of_the_dense_way(mode, name, ranks):
    found, dense = (ranks[0][mode, name, way] for way in ("fused", "dense"))
    assert dense["way"] == "whole (fused_losses=False)"
    if (mode, name) == ("zero3", "adapters"):  # which gathers the weights of each module when that runs
        assert found["way"] == "whole (student: the output head is a Linear and not an ordinary nn.Linear)"
    else:
        assert found["way"] == FUSED
    exact = 5e-3 if "bf16" in name else 1e-5 if mode == "zero3" else 1e-6
    agree(found, dense, exact)
    assert found["metrics"] == pytest.approx(dense["metrics"], rel=2 * exact)
    assert identical(ranks[1][mode, name, "fused"]["after"], found["after"]) == []


@pytest.mark.parametrize("name", [name for name in CASES if "bf16" not in name])
def test_the_numbers_are_those_of_one_process(name, ranks, tmp_path):
    alone = fused_ranks.outcome(fused_ranks.build(name, tmp_path, 1, fused_losses=False))
    for mode in MODES:
        agree(ranks[0][mode, name, "fused"], alone, 1e-5 if mode == "zero3" else 1e-6)
