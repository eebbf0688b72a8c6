"""The losses on two vectors against loops in numpy."""

import math

import numpy as np
import pytest
import torch

from silverspoon_kd.errors import LossError
from silverspoon_kd.losses import angular_magnitude_loss, cosine_loss, mse_loss, normalized_mse_loss, smooth_l1_loss

MASK = np.array([[1, 1, 0, 1], [0, 1, 1, 1]])


def sides(*shape):
    generator = np.random.default_rng(7)
    return generator.normal(size=shape), generator.normal(size=shape)


def mean_of(value_of, student, teacher, mask=None):
    """Apply a function of two vectors to each position that counts, and average."""
    values = [
        value_of(student[position], teacher[position])
        for position in np.ndindex(student.shape[:-1])
        if mask is None or mask[position]
    ]
    return sum(values) / len(values)


def squared_error(s, t):
    return sum((a - b) ** 2 for a, b in zip(s, t, strict=True)) / len(s)


def relative_error(s, t):
    return sum((a - b) ** 2 for a, b in zip(s, t, strict=True)) / (sum(b * b for b in t) + len(t) * 1e-3)


def one_minus_cosine(s, t):
    dot = sum(a * b for a, b in zip(s, t, strict=True))
    return 1 - dot / math.sqrt(sum(a * a for a in s) * sum(b * b for b in t))


def huber(s, t):
    gaps = [abs(a - b) for a, b in zip(s, t, strict=True)]
    return sum(gap**2 / (2 * 0.5) if gap < 0.5 else gap - 0.25 for gap in gaps) / len(s)


def angle_and_length(s, t):
    lengths = math.hypot(*s), math.hypot(*t)
    half_turns = math.acos(1 - one_minus_cosine(s, t)) / math.pi
    return 0.7 * half_turns + 0.2 * ((lengths[0] - lengths[1]) / (lengths[1] + 1e-2)) ** 2


CASES = {
    "mse": (mse_loss(), squared_error),
    "normalized_mse": (normalized_mse_loss(eps=1e-3), relative_error),
    "cosine": (cosine_loss(), one_minus_cosine),
    "smooth_l1": (smooth_l1_loss(beta=0.5), huber),
    "angular_magnitude": (angular_magnitude_loss(angle_weight=0.7, magnitude_weight=0.2, eps=1e-2), angle_and_length),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("masked", [False, True])
def test_equals_a_loop(name, masked):
    loss, value_of = CASES[name]
    student, teacher = sides(2, 4, 5)
    mask = MASK if masked else None
    found = loss(torch.tensor(student), torch.tensor(teacher), None if mask is None else torch.tensor(mask))
    assert found.item() == pytest.approx(mean_of(value_of, student, teacher, mask), rel=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_equal_sides_give_0_and_a_finite_gradient(name):
    teacher = torch.randn(3, 4, 6)
    student = teacher.clone().requires_grad_()
    value = CASES[name][0](student, teacher)
    value.backward()
    assert value.item() == pytest.approx(0, abs=1e-6)
    assert student.grad.isfinite().all()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("zero", ["student", "teacher", "both"])
def test_zero_vectors_have_finite_values_and_gradients(name, zero):
    student, teacher = torch.randn(2, 3, 6), torch.randn(2, 3, 6)
    if zero != "teacher":
        student[0, 0] = 0
    if zero != "student":
        teacher[0, 0] = 0
    student.requires_grad_()
    value = CASES[name][0](student, teacher)
    value.backward()
    assert value.isfinite()
    assert student.grad.isfinite().all()


def test_cosine_of_a_zero_vector_is_that_of_a_right_angle():
    assert cosine_loss()(torch.zeros(1, 4), torch.ones(1, 4)).item() == 1


def test_a_tiny_angle_is_not_rounded_away():
    # arccos of a float32 cosine cannot tell this angle from 0.
    student, teacher = torch.tensor([[1.0, 1e-5]]), torch.tensor([[1.0, 0.0]])
    value = angular_magnitude_loss(magnitude_weight=0)(student, teacher)
    assert value.item() == pytest.approx(1e-5 / math.pi, rel=1e-4)


def test_smooth_l1_with_beta_0_is_the_absolute_difference():
    student, teacher = torch.tensor([[1.0, -2.0]]), torch.tensor([[0.5, 1.0]])
    assert smooth_l1_loss(beta=0)(student, teacher).item() == pytest.approx((0.5 + 3) / 2)


@pytest.mark.parametrize(
    ("factory", "options"),
    [
        (smooth_l1_loss, {"beta": -1}),
        (normalized_mse_loss, {"eps": 0}),
        (angular_magnitude_loss, {"angle_weight": -0.1}),
        (angular_magnitude_loss, {"magnitude_weight": math.nan}),
        (angular_magnitude_loss, {"eps": "small"}),
    ],
)
def test_a_hyperparameter_out_of_range_is_refused(factory, options):
    ((argument, value),) = options.items()
    with pytest.raises(LossError, match=f"{argument}={value!r}"):
        factory(**options)
