"""What several ranks must not change: what is trained, what is frozen, and that all ranks stay one model."""

import copy
from itertools import pairwise

import pytest
import torch

from parity.cases import (
    ACCUMULATION_4,
    BOTH,
    EARLY_BLOCK,
    LAYER_DROP,
    MOVED,
    NORMS,
    ONE,
    PARITY_CASES,
    RANKS,
    Case,
    Collate,
    Layout,
    ParityRows,
    build_student,
    build_teacher,
)
from parity.runs import identical, moved, relative, run
from silverspoon_kd import create_alignments
from silverspoon_kd.errors import TrainingError

EXACT = 1e-6


def of_block(name):
    return name.startswith("student.model.layers.0.")


@pytest.mark.multiprocess
@pytest.mark.parametrize("case", EARLY_BLOCK, ids=lambda case: case.name)
def test_f_02_loss_on_the_first_block_only(case, on_ranks, single):
    outcomes = on_ranks(case, RANKS)
    assert identical(outcomes[0].after, outcomes[1].after) == []
    for outcome in outcomes:
        assert outcome.wrapped == "DistributedDataParallel"
        expected = {name for name in outcome.after if of_block(name)}
        expected |= {"student.model.embed_tokens.weight"} if case.distiller == "holistic" else set()
        assert set(identical(outcome.after, outcome.before)) == set(outcome.optimized) == expected
        assert moved(outcome) > MOVED
        assert relative(outcome.after, single(case, ONE).after) < EXACT


@pytest.mark.multiprocess
@pytest.mark.parametrize("case", PARITY_CASES, ids=lambda case: case.name)
def test_f_03_ranks_with_different_rows_stay_one_model(case, on_ranks, single):
    first, second = on_ranks(case, RANKS)
    assert identical(first.after, second.after) == []
    assert relative(first.after, single(case, ONE).after) < EXACT


@pytest.mark.multiprocess
@pytest.mark.parametrize("distiller", ["response", "holistic", "blockwise"])
def test_f_03_a_step_round_the_wrapper_is_refused(distiller, on_ranks):
    case = next(case for case in PARITY_CASES if case.distiller == distiller)
    for outcome in on_ranks(case, RANKS):
        assert "unwrapped student on one of 2 ranks" in outcome.refusal


@pytest.mark.multiprocess
@pytest.mark.parametrize("case", [*PARITY_CASES, *NORMS], ids=lambda case: case.name)
def test_f_04_teacher_is_never_wrapped_and_never_changes(case, on_ranks):
    teacher = build_teacher(case)
    assert sum(parameter.requires_grad for parameter in teacher.parameters()) == 1  # left so by its owner
    for outcome in on_ranks(case, BOTH if case in NORMS else RANKS):
        assert outcome.teacher == {
            "class": type(teacher).__name__,
            "unchanged": True,
            "trainable": [],
            "gradients": [],
        }


@pytest.mark.parametrize("case", PARITY_CASES, ids=lambda case: case.name)
def test_teacher_is_the_same_before_and_after_on_one_process(case, single):
    teacher = single(case, ONE).teacher
    assert (teacher["unchanged"], teacher["trainable"], teacher["gradients"]) == (True, [], [])


@pytest.mark.multiprocess
@pytest.mark.parametrize("case", NORMS, ids=lambda case: case.name)
def test_f_05_running_statistics_are_the_same_on_both_ranks(case, on_ranks):
    first, second = on_ranks(case, BOTH)
    fresh = dict(build_student(case).named_buffers())
    assert len(identical(first.buffers, fresh)) >= 6  # three blocks: mean and variance moved
    assert identical(first.buffers, second.buffers) == []
    assert identical(first.after, second.after) == []
    assert moved(first) > MOVED


def draws(rank, step):
    """Which of the four layers are dropped."""
    torch.manual_seed(1000 * rank + step)
    return [bool(torch.rand([]) < 0.5) for _ in range(4)]


def layer_drop_by_hand(case):
    """Two ranks with random numbers of their own, one after the other: sums over both, divided by the count of both."""
    student, teacher = build_student(case).train(), build_teacher(case).eval()
    rows = ParityRows(4 * case.steps).rows
    for step in range(case.steps):
        totals, count = [], 0
        for rank in range(2):
            batch = Collate()(rows[4 * step + 2 * rank :][:2])
            labels = batch.pop("labels")
            torch.manual_seed(1000 * rank + step)
            q = student(**batch, use_cache=False).logits.log_softmax(-1)
            with torch.no_grad():
                p = teacher(**batch, use_cache=False).logits.log_softmax(-1)
            divergence = (p.exp() * (p - q)).sum(-1)[:, :-1]
            counts = labels[:, 1:] != -100
            totals.append(divergence[counts].sum())
            count += int(counts.sum())
        (sum(totals) / count).backward()
        with torch.no_grad():
            for parameter in student.parameters():
                if parameter.grad is not None:
                    parameter -= case.learning_rate * parameter.grad
                    parameter.grad = None
    return {f"student.{name}": each.detach() for name, each in student.named_parameters()}


@pytest.mark.multiprocess
def test_f_06_dropped_layers_differ_by_rank_and_step(on_ranks):
    case = LAYER_DROP
    ranks = [[draws(rank, step) for step in range(case.steps)] for rank in range(2)]
    assert any(one != other for one, other in zip(*ranks, strict=True))
    assert any(one != other for one, other in pairwise(ranks[0]))
    outcomes = on_ranks(case, RANKS)
    expected = layer_drop_by_hand(case)
    assert identical(outcomes[0].after, outcomes[1].after) == []
    for outcome in outcomes:
        assert (outcome.wrapped, outcome.static_graph) == ("DistributedDataParallel", False)
        assert moved(outcome) > MOVED
        assert relative(outcome.after, expected) < EXACT


def test_f_06_an_aligned_layer_that_is_dropped_is_refused_by_name(tmp_path):
    case = Case("holistic-layer_drop", "holistic", "layer_drop")
    student = build_student(case)
    teacher = copy.deepcopy(student)
    pattern = r"model\.decoder\.layers\.\d+"
    alignments = create_alignments(teacher, student, pattern, output_selector_index=0)
    with pytest.raises(TrainingError, match=r"aligned module 'model\.decoder\.layers\.\d' .* did not run"):
        run(case, ONE, tmp_path, student=student, teacher=teacher, alignments=alignments)


@pytest.mark.multiprocess
def test_f_07_accumulation_of_4_on_two_ranks_equals_one_batch_of_8(on_ranks, single):
    case = ACCUMULATION_4
    whole = single(case, Layout(batch=8))
    outcomes = on_ranks(case, Layout(batch=1, accumulation=4, ranks=2))
    assert identical(outcomes[0].after, outcomes[1].after) == []
    for outcome in outcomes:
        assert moved(outcome) > MOVED
        assert relative(outcome.after, whole.after) < EXACT
        for left, right in zip(outcome.losses, whole.losses, strict=True):
            assert left == pytest.approx(right, rel=2 * EXACT)
