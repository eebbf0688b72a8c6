"""Attention-map transfer against a loop."""

import numpy as np
import pytest
import torch

from silverspoon_kd.errors import LossError
from silverspoon_kd.losses import attention_loss

MASK = np.array([[1, 1, 0], [1, 0, 0]])


def maps(heads, keys=3, seed=0):
    weights = np.random.default_rng(seed).random(size=(2, heads, 3, keys))
    return weights / weights.sum(-1, keepdims=True)


def reference(student, teacher, mask):
    values = []
    for row, query in zip(*mask.nonzero(), strict=True):
        gaps = [(a - b) ** 2 for a, b in zip(student[row, :, query].flat, teacher[row, :, query].flat, strict=True)]
        values.append(sum(gaps) / student.shape[1])
    return sum(values), len(values)


def test_equals_a_loop_over_queries_heads_and_keys():
    student, teacher = maps(4, seed=1), maps(4, seed=2)
    total, count = reference(student, teacher, MASK)
    result = attention_loss().sum_and_count(torch.tensor(student), torch.tensor(teacher), torch.tensor(MASK))
    assert result.total.item() == pytest.approx(total, rel=1e-12)
    assert result.count.item() == count
    total, count = reference(student, teacher, np.ones((2, 3)))
    assert attention_loss()(torch.tensor(student), torch.tensor(teacher)).item() == pytest.approx(total / count)


def test_different_numbers_of_heads_are_averaged_on_both_sides():
    student, teacher = maps(2, seed=1), maps(6, seed=2)
    total, count = reference(student.mean(1, keepdims=True), teacher.mean(1, keepdims=True), MASK)
    found = attention_loss()(torch.tensor(student), torch.tensor(teacher), torch.tensor(MASK))
    assert found.item() == pytest.approx(total / count, rel=1e-12)


def test_padded_keys_and_queries_change_nothing():
    student, teacher = torch.tensor(maps(2, seed=1)), torch.tensor(maps(2, seed=2))
    mask = torch.tensor(MASK)
    padded = [torch.nn.functional.pad(side, (0, 4, 0, 4)) for side in (student, teacher)]
    padded[0][:, :, 3:] = torch.nan
    found = attention_loss()(*padded, torch.nn.functional.pad(mask, (0, 4)))
    torch.testing.assert_close(found, attention_loss()(student, teacher, mask))


def test_it_tells_the_trainer_its_layout():
    assert attention_loss().layout == "attention"


@pytest.mark.parametrize(
    ("student", "teacher", "message"),
    [
        ((2, 3, 4), (2, 3, 4), r"\[batch, heads, query, key\].*\[2, 3, 4\]"),
        ((2, 3, 4, 4), (2, 3, 5, 5), r"\[2, 3, 4, 4\].*\[2, 3, 5, 5\]"),
        ((2, 3, 4, 4), (1, 6, 4, 4), r"\[2, 3, 4, 4\].*\[1, 6, 4, 4\]"),
    ],
)
def test_other_shapes_are_refused(student, teacher, message):
    with pytest.raises(LossError, match=message):
        attention_loss()(torch.rand(student), torch.rand(teacher))


def test_the_mask_counts_queries():
    with pytest.raises(LossError, match=r"mask \[2, 4\].*positions \[2, 3\]"):
        attention_loss()(torch.tensor(maps(2)), torch.tensor(maps(2)), torch.ones(2, 4, dtype=torch.bool))
