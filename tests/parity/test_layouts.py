"""The same rows divided in different ways give the same weights and the same losses."""

import pytest

from parity.cases import ACCUMULATED, BOTH, BOTH_CASES, MOVED, ONE, PARITY_CASES, RANKS
from parity.runs import identical, moved, relative

EXACT = 1e-6


def same_losses(one, other):
    assert len(one.losses) == len(other.losses)
    for step, (left, right) in enumerate(zip(one.losses, other.losses, strict=True)):
        assert left == pytest.approx(right, rel=2 * EXACT), f"step {step + 1}"


def same_training(one, other):
    assert moved(other) > MOVED
    assert relative(one.after, other.after) < EXACT
    same_losses(one, other)


@pytest.mark.parametrize("case", PARITY_CASES, ids=lambda case: case.name)
def test_accumulation_equals_one_batch(case, single):
    same_training(single(case, ACCUMULATED), single(case, ONE))


def equal_to_one_process(outcomes, whole):
    assert [outcome.wrapped for outcome in outcomes] == ["DistributedDataParallel"] * 2
    assert identical(outcomes[0].after, outcomes[1].after) == []
    for outcome in outcomes:
        assert identical(outcome.before, whole.before) == []
        same_training(outcome, whole)


@pytest.mark.multiprocess
@pytest.mark.parametrize("case", PARITY_CASES, ids=lambda case: case.name)
def test_f_10_two_ranks_equal_one_process(case, single, on_ranks):
    equal_to_one_process(on_ranks(case, RANKS), single(case, ONE))


@pytest.mark.multiprocess
@pytest.mark.parametrize("case", BOTH_CASES, ids=lambda case: case.name)
def test_f_10_accumulation_on_two_ranks_equals_one_process(case, single, on_ranks):
    equal_to_one_process(on_ranks(case, BOTH), single(case, ONE))
