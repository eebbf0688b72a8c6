"""Linear CKA against the definition through HSIC."""

import numpy as np
import pytest
import torch

from silverspoon_kd.losses import cka_loss

MASK = np.array([[1, 1, 0, 1], [1, 0, 1, 1]])


def one_minus_cka(x, y):
    n = len(x)
    centring = np.eye(n) - np.ones((n, n)) / n

    def hsic(a, b):
        return np.trace(centring @ (a @ a.T) @ centring @ (b @ b.T)) / (n - 1) ** 2

    return 1 - hsic(x, y) / np.sqrt(hsic(x, x) * hsic(y, y))


@pytest.mark.parametrize("features", [3, 40])
def test_equals_the_definition(features):
    student, teacher = np.random.normal(size=(2, 2, 4, features)) + 2
    where = MASK.astype(bool)
    result = cka_loss().sum_and_count(torch.tensor(student), torch.tensor(teacher), torch.tensor(MASK))
    assert result.count.item() == 6
    assert result.total.item() == pytest.approx(6 * one_minus_cka(student[where], teacher[where]), rel=1e-10)


def test_rotation_scale_and_shift_do_not_matter():
    teacher = torch.randn(3, 8, 5)
    rotation = torch.linalg.qr(torch.randn(5, 5)).Q
    assert cka_loss()(3 * teacher @ rotation + 7, teacher).item() == pytest.approx(0, abs=1e-5)


def test_huge_activations_stay_in_range():
    student, teacher = torch.randn(16, 8) * 1e9, torch.randn(16, 8) * 1e-9
    expected = cka_loss()(student / 1e9, teacher / 1e-9)
    torch.testing.assert_close(cka_loss()(student, teacher), expected)


@pytest.mark.parametrize(("num_valid", "expected"), [(0, 0), (1, 0), (3, 1)])
def test_nothing_to_align(num_valid, expected):
    student, teacher = torch.ones(4, 5, requires_grad=True), torch.randn(4, 5)
    value = cka_loss()(student, teacher, torch.arange(4) < num_valid)
    value.backward()
    assert value.item() == expected
    assert (student.grad == 0).all()
