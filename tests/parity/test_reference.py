"""The library's numbers against distillation by hand in float64."""

import dataclasses

import pytest
import torch
from torch import nn

from parity.by_reference import by_hand, named_losses, parameters
from parity.cases import (
    LOCAL_MEANS,
    MOVED,
    ONE,
    PARITY_CASES,
    RAGGED_LOCAL_MEANS,
    RANKS,
    build_student,
    build_teacher,
)
from parity.runs import build, moved, relative, run, train
from silverspoon_kd import create_alignments

EXACT = 1e-6
BY_NAME = {case.name: case for case in PARITY_CASES}


def agree(outcome, result, exact=EXACT):
    assert moved(outcome) > MOVED
    assert relative(outcome.after, parameters(result)) < exact
    for logged, wanted in zip(outcome.losses, named_losses(result), strict=True):
        assert logged == pytest.approx(wanted, rel=max(exact, EXACT))


@pytest.mark.parametrize("case", PARITY_CASES, ids=lambda case: case.name)
def test_training_equals_the_reference(case, single):
    outcome = single(case, ONE)
    agree(outcome, by_hand(case, outcome.before))


@pytest.mark.parametrize("name", ["response-task", "holistic-narrow", "blockwise-narrow-task"])
def test_models_in_float64_agree_closer(name, tmp_path):
    case = BY_NAME[name]
    student, teacher = build_student(case).double(), build_teacher(case).double()
    outcome = run(case, ONE, tmp_path, student=student, teacher=teacher)
    assert {each.dtype for each in outcome.after.values()} == {torch.float64}
    agree(outcome, by_hand(case, outcome.before), exact=1e-7)


@pytest.mark.parametrize("name", ["holistic-narrow", "blockwise-narrow"])
def test_projectors_given_by_the_user_are_used_and_trained(name, tmp_path):
    case = BY_NAME[name]
    teacher, student = build_teacher(case), build_student(case)
    alignments = create_alignments(teacher, student, case.modules, output_selector_index=0)
    torch.manual_seed(7)
    for alignment in alignments:
        alignment.output_projector = nn.Linear(24, 32)
        if case.distiller == "blockwise":
            alignment.input_projector = nn.Linear(32, 24)
    given = [each.output_projector.weight for each in alignments]
    kept = [weight.detach().clone() for weight in given]
    distiller = build(case, ONE, tmp_path, teacher=teacher, student=student, alignments=alignments)
    outcome = train(distiller)
    for index in range(2):
        assert torch.equal(outcome.before[f"projectors.{index}.output.weight"], kept[index])
        assert not torch.equal(outcome.after[f"projectors.{index}.output.weight"], kept[index])
    agree(outcome, by_hand(case, outcome.before))


@pytest.mark.parametrize("name", ["holistic-task", "blockwise-narrow-task"])
def test_magnitude_aware_weighting_divides_by_the_detached_value(name, tmp_path):
    case = dataclasses.replace(BY_NAME[name], loss_weight=1.0)
    outcome = run(case, ONE, tmp_path, magnitude_aware_weighting=True)
    agree(outcome, by_hand(case, outcome.before, magnitude_aware=True))


@pytest.mark.parametrize("name", ["response-task", "response-mean_loss-task", "blockwise-narrow-task"])
def test_label_smoothing_changes_the_students_own_loss(name, tmp_path):
    case = BY_NAME[name]
    outcome = run(case, ONE, tmp_path, label_smoothing_factor=0.2)
    agree(outcome, by_hand(case, outcome.before, label_smoothing=0.2))


def test_temperature_is_squared_back(tmp_path):
    case = BY_NAME["response-task"]
    outcome = run(case, ONE, tmp_path, loss_arguments={"temperature": 3.0})
    agree(outcome, by_hand(case, outcome.before, temperature=3.0))


@pytest.mark.multiprocess
@pytest.mark.parametrize("case", LOCAL_MEANS, ids=lambda case: case.name)
def test_f_10_local_means_of_equal_rows_equal_one_process(case, on_ranks, single):
    for outcome in on_ranks(case, RANKS):
        assert relative(outcome.after, single(case, ONE).after) < EXACT
        agree(outcome, by_hand(case, outcome.before))


@pytest.mark.multiprocess
def test_f_10_local_means_of_ragged_rows_average_the_ranks(on_ranks):
    case = RAGGED_LOCAL_MEANS
    for outcome in on_ranks(case, RANKS):
        agree(outcome, by_hand(case, outcome.before, num_shares=2))
        global_mean = by_hand(case, outcome.before)
        assert relative(outcome.after, parameters(global_mean)) > 100 * EXACT
