"""InfoNCE against a loop."""

import math

import numpy as np
import pytest
import torch

from silverspoon_kd.errors import LossError
from silverspoon_kd.losses import contrastive_loss

MASK = np.array([[1, 0, 1], [1, 1, 0]])


def info_nce(student, teacher, temperature):
    def cosine(a, b):
        return a @ b / (np.linalg.norm(a) * np.linalg.norm(b))

    values = []
    for i, anchor in enumerate(student):
        weights = [math.exp(cosine(anchor, candidate) / temperature) for candidate in teacher]
        values.append(-math.log(weights[i] / sum(weights)))
    return values


@pytest.mark.parametrize("temperature", [0.07, 1.0])
def test_candidates_are_the_valid_positions_of_all_rows(temperature):
    student, teacher = np.random.normal(size=(2, 2, 3, 5))
    where = MASK.astype(bool)
    values = info_nce(student[where], teacher[where], temperature)
    loss = contrastive_loss(temperature=temperature)
    result = loss.sum_and_count(torch.tensor(student), torch.tensor(teacher), torch.tensor(MASK))
    assert result.total.item() == pytest.approx(sum(values), rel=1e-10)
    assert result.count.item() == 4


def test_a_lone_position_has_no_negatives():
    student = torch.randn(1, 3, 5, requires_grad=True)
    value = contrastive_loss()(student, torch.randn(1, 3, 5), torch.tensor([[0, 1, 0]]))
    value.backward()
    assert value.item() == 0
    assert (student.grad == 0).all()


def test_the_own_position_is_the_positive():
    teacher = torch.eye(4)
    assert contrastive_loss()(teacher, teacher) < 1e-4 < contrastive_loss()(teacher.roll(1, 0), teacher)


def test_temperature_must_be_positive():
    with pytest.raises(LossError, match="temperature=0"):
        contrastive_loss(temperature=0)
