"""A divergence and the cross entropy with labels in one pass, against both formulas over whole logits in float64."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from silverspoon_kd.errors import LossError
from silverspoon_kd.losses import OutputHead, TaskLabels, fused, fused_task_and_divergence, kl_divergence_loss
from unit.losses.test_fused import LOSSES, MASK, case, formula, gradients, relative_errors

LABELS = torch.tensor([[3, -100, 36, 0], [-100, -100, 7, 7]])  # at a masked position too
WEIGHTS = (0.3, 1.7)


def of_heads(loss, case, mask=MASK, labels=LABELS, weights=WEIGHTS, **options):
    student_head = OutputHead(case.weight, case.bias, case.scale, case.soft_cap)
    task = TaskLabels(labels, *(torch.tensor(weight, dtype=case.hidden.dtype) for weight in weights))
    return fused_task_and_divergence(
        loss, case.hidden, student_head, case.teacher, case.teacher_head, mask, task, **options
    )


def cross_entropy(case, labels):
    logits = (case.hidden @ case.weight.T + (0 if case.bias is None else case.bias)) * case.scale
    logits = logits if case.soft_cap is None else case.soft_cap * torch.tanh(logits / case.soft_cap)
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")


@settings(max_examples=40)
@given(
    name=st.sampled_from(sorted(LOSSES)),
    temperature=st.sampled_from([0.5, 1.0, 3.0]),
    positions=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    sizes=st.sampled_from([(50, 50), (50, 53), (64, 50), (3, 2)]),
    bias=st.booleans(),
    masked=st.booleans(),
    weights=st.sampled_from([(0.3, 1.7), (0.0, 1.0), (1.0, 0.0)]),
    scale=st.sampled_from([1.0, 0.25, -1.5]),
    soft_cap=st.sampled_from([None, 2.0]),
    chunk_bytes=st.sampled_from([1, 1000, 2**20]),
    seed=st.integers(0, 2**31),
)
def test_equals_both_formulas_over_whole_logits(
    name, temperature, positions, sizes, masked, weights, chunk_bytes, seed, **options
):
    single = case(positions=tuple(positions), seed=seed, sizes=sizes, **options).to(torch.float32)
    numbers = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, sizes[0], positions, generator=numbers)
    labels[torch.rand(positions, generator=numbers) < 0.3] = -100
    mask = torch.rand(positions, generator=numbers) < 0.6 if masked else None
    found = of_heads(LOSSES[name](temperature=temperature), single, mask, labels, weights, chunk_bytes=chunk_bytes)
    exact = single.to(torch.float64)
    divergence, task = formula(name, temperature, exact, mask), cross_entropy(exact, labels)
    expected = weights[0] * divergence + weights[1] * task
    size = max(1, labels.numel())
    assert found.divergence.total.item() == pytest.approx(divergence.item(), rel=1e-5, abs=2e-8 * temperature**2 * size)
    assert found.divergence.count.item() == (labels.numel() if mask is None else mask.sum())
    assert found.task.item() == pytest.approx(task.item(), rel=1e-5, abs=1e-6 * size)
    assert found.combined.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-6 * size)
    assert not (found.task.requires_grad or found.divergence.total.requires_grad)
    for mine, right in zip(gradients(found.combined, single), gradients(expected, exact), strict=True):
        assert mine.dtype == torch.float32
        assert (mine.double() - right).norm() <= 1e-5 * right.norm() + 1e-6


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("name", LOSSES)
def test_gradient_is_right(name, soft_cap):
    loss = LOSSES[name](temperature=1.7, chunk_size=3)
    made = case(soft_cap=soft_cap, scale=0.5, widths=(3, 4), sizes=(37, 36))

    def function(hidden, weight, bias):
        return of_heads(loss, dataclasses.replace(made, hidden=hidden, weight=weight, bias=bias)).combined

    assert torch.autograd.gradcheck(function, tuple(made.tensors))


@pytest.mark.parametrize("chosen", [True, False], ids=["rows are chosen", "rows are blanked"])
@pytest.mark.parametrize("rubbish", [torch.nan, torch.inf])
def test_positions_count_for_what_they_are_there_for(rubbish, chosen, monkeypatch):
    """What no loss looks at may be anything, and the teacher may be where only the cross entropy counts."""
    monkeypatch.setattr(fused, "_selects_rows", lambda device: chosen)
    made = case().to(torch.float32)
    wanted = MASK.bool() | (LABELS != -100)
    assert not wanted.all() and not MASK.bool()[LABELS != -100].all()
    hidden = made.hidden.detach().where(wanted[..., None], torch.tensor(rubbish)).requires_grad_()
    teacher = made.teacher.where(MASK.bool()[..., None], torch.tensor(rubbish))
    found = of_heads(kl_divergence_loss(temperature=2.0), dataclasses.replace(made, hidden=hidden, teacher=teacher))
    exact = made.to(torch.float64)
    exact_total = WEIGHTS[0] * formula("forward", 2.0, exact, MASK) + WEIGHTS[1] * cross_entropy(exact, LABELS)
    assert found.combined.item() == pytest.approx(exact_total.item(), rel=1e-5)
    ours = torch.autograd.grad(found.combined, [hidden, made.weight, made.bias])
    assert max(relative_errors(ours, gradients(exact_total, exact))) < 1e-5


def test_labels_that_do_not_belong_to_the_positions_are_refused():
    for labels, words in (
        (LABELS[:1], r"labels torch.int64 \[1, 4\] must be whole numbers, one for each of the positions \[2, 4\]"),
        (LABELS.float(), r"labels torch.float32 \[2, 4\]"),
        (None, "labels NoneType"),
    ):
        with pytest.raises(LossError, match=words):
            of_heads(kl_divergence_loss(), case(), labels=labels)
