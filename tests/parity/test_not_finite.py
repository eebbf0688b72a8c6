"""A loss that is NaN: an error in the first step; later only its own block stands still, and is named."""

import dataclasses
import logging

import pytest
import torch
from transformers import TrainerCallback

from parity.cases import ACCUMULATED, MOVED, ONE, PARITY_CASES, build_student, build_teacher
from parity.runs import build, identical, moved, run, train
from silverspoon_kd import create_alignments
from silverspoon_kd.errors import TrainingError

SICK, HEALTHY = "model.layers.1", ("model.layers.0", "model.layers.2")
BLOCKWISE = next(case for case in PARITY_CASES if case.name == "blockwise-narrow")


def mse_until(last_call, constant=False):
    """Mean squared error that becomes NaN after ``last_call`` calls; ``constant``: without a gradient that is NaN."""
    calls = 0

    def loss(student, teacher):
        nonlocal calls
        calls += 1
        value = (student - teacher).square().mean()
        broken = calls > last_call
        return value + float("nan") if broken and constant else value * float("nan") if broken else value

    return loss


class Steps(TrainerCallback):
    """Keep the parameters as they are after each step."""

    def __init__(self):
        self.after = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.after.append({name: each.detach().clone() for name, each in model.named_parameters()})


def alignments_with(teacher, student, last_call, **options):
    lists = [create_alignments(teacher, student, name.replace(".", r"\."), output_selector_index=0) for name in HEALTHY]
    loss = mse_until(last_call, **options)
    sick = create_alignments(teacher, student, r"model\.layers\.1", loss, output_selector_index=0)
    return lists[0] + sick + lists[1]


def distiller_with(tmp_path, last_call, layout=ONE, case=BLOCKWISE, options=None, **changes):
    teacher, student = build_teacher(case), build_student(case)
    alignments = alignments_with(teacher, student, last_call, **(options or {}))
    return build(case, layout, tmp_path, teacher=teacher, student=student, alignments=alignments, **changes)


def part(parameters, *numbers):
    """The parameters of some blocks and of their projectors."""
    prefixes = [prefix for k in numbers for prefix in (f"student.model.layers.{k}.", f"projectors.{k}.")]
    return {name: each for name, each in parameters.items() if name.startswith(tuple(prefixes))}


@pytest.mark.parametrize("options", [{}, {"constant": True}], ids=["nan gradient", "nan value"])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_nan_in_one_block_stops_only_that_block(options, max_grad_norm, tmp_path, caplog):
    healthy = train(distiller_with(tmp_path, last_call=100, max_grad_norm=max_grad_norm))
    steps = Steps()
    distiller = distiller_with(tmp_path, last_call=1, options=options, max_grad_norm=max_grad_norm)
    distiller.add_callback(steps)
    with caplog.at_level(logging.WARNING, logger="silverspoon_kd"):
        outcome = train(distiller)
    assert moved(outcome) > MOVED
    assert identical(part(outcome.after, 0, 2), part(healthy.after, 0, 2)) == []
    first = steps.after[0]
    assert len(identical(part(first, 1), part(outcome.before, 1))) == len(part(first, 1)) > 0
    if not options:
        assert identical(part(outcome.after, 1), part(first, 1)) == []
    assert all(torch.isfinite(each).all() for each in outcome.after.values())
    warnings = [record.getMessage() for record in caplog.records if "not finite" in record.getMessage()]
    assert len(warnings) == 3  # steps 2, 3 and 4
    assert all(repr(SICK) in text and not any(repr(name) in text for name in HEALTHY) for text in warnings)


def test_nan_block_is_named_in_the_log_and_the_others_have_values(tmp_path):
    outcome = train(distiller_with(tmp_path, last_call=1))
    healthy = train(distiller_with(tmp_path, last_call=100))
    for broken, whole in zip(outcome.losses[1:], healthy.losses[1:], strict=True):
        assert broken[f"loss/{SICK}"] != broken[f"loss/{SICK}"]
        assert all(broken[f"loss/{name}"] == whole[f"loss/{name}"] for name in HEALTHY)


def test_nan_in_one_micro_batch_skips_the_whole_step_of_its_block(tmp_path):
    steps = Steps()
    distiller = distiller_with(tmp_path, last_call=3, layout=ACCUMULATED)  # the second micro-batch of step 2
    distiller.add_callback(steps)
    outcome = train(distiller)
    healthy = train(distiller_with(tmp_path, last_call=100, layout=ACCUMULATED))
    assert identical(part(outcome.after, 0, 2), part(healthy.after, 0, 2)) == []
    assert identical(part(steps.after[1], 1), part(steps.after[0], 1)) == []


@pytest.mark.parametrize("layout", [ONE, ACCUMULATED], ids=["one", "accumulated"])
def test_nan_in_the_first_step_is_an_error_and_nothing_has_changed(layout, tmp_path):
    distiller = distiller_with(tmp_path, last_call=0, layout=layout)
    before = {name: each.detach().clone() for name, each in distiller.root.named_parameters()}
    with pytest.raises(TrainingError, match=r"loss of 'model\.layers\.1' is not finite in the first step"):
        distiller.train()
    assert identical(before, {name: each.detach() for name, each in distiller.root.named_parameters()}) == []


def test_nan_in_the_second_micro_batch_of_the_first_step_is_an_error(tmp_path):
    distiller = distiller_with(tmp_path, last_call=1, layout=ACCUMULATED)
    with pytest.raises(TrainingError, match=r"loss of 'model\.layers\.1' is not finite in the first step"):
        distiller.train()


@pytest.mark.parametrize("kind", ["holistic", "response"])
def test_nan_elsewhere_is_named_too(kind, tmp_path, caplog):
    case = dataclasses.replace(BLOCKWISE, distiller=kind, student="same")
    if kind == "response":
        teacher = build_teacher(case)
        with torch.no_grad():
            teacher.lm_head.weight[5] = float("nan")
        with pytest.raises(TrainingError, match="loss of 'logits' is not finite in the first step"):
            run(case, ONE, tmp_path, teacher=teacher)
        return
    distiller = distiller_with(tmp_path, last_call=1, case=case)
    with caplog.at_level(logging.WARNING, logger="silverspoon_kd"):
        outcome = train(distiller)
    assert all(torch.isfinite(each).all() for each in outcome.after.values())
    assert sum(repr(SICK) in record.getMessage() for record in caplog.records) == 3
