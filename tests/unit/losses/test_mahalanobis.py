"""Distances in the teacher's metric against explicit inverses in numpy."""

import numpy as np
import pytest
import torch

from silverspoon_kd.errors import LossError
from silverspoon_kd.losses import cosine_loss, mahalanobis_cosine_loss, mahalanobis_mse_loss, mse_loss

MASK = np.array([[1, 1, 0, 1, 1], [0, 1, 1, 1, 0]])


def sides():
    generator = np.random.default_rng(3)
    return generator.normal(size=(2, 2, 5, 3)) * np.array([1.0, 10.0, 0.1])


def precision_of(rows, shrinkage, eps):
    mean = sum(rows) / len(rows)
    covariance = sum(np.outer(row - mean, row - mean) for row in rows) / len(rows)
    size = covariance.shape[0]
    shrunk = (1 - shrinkage) * covariance + (shrinkage * np.trace(covariance) / size + eps) * np.eye(size)
    return np.linalg.inv(shrunk)


def squared_distance(s, t, precision):
    return (s - t) @ precision @ (s - t) / len(s)


def one_minus_cosine(s, t, precision):
    return 1 - s @ precision @ t / np.sqrt((s @ precision @ s) * (t @ precision @ t))


CASES = {
    "mse": (mahalanobis_mse_loss, squared_distance),
    "cosine": (mahalanobis_cosine_loss, one_minus_cosine),
}


@pytest.mark.parametrize("name", CASES)
def test_the_precision_comes_from_the_teacher_where_the_mask_is_set(name):
    factory, value_of = CASES[name]
    student, teacher = sides()
    where = MASK.astype(bool)
    precision = precision_of(teacher[where], shrinkage=0.2, eps=1e-3)
    expected = np.mean([value_of(s, t, precision) for s, t in zip(student[where], teacher[where], strict=True)])
    found = factory(shrinkage=0.2, eps=1e-3)(torch.tensor(student), torch.tensor(teacher), torch.tensor(MASK))
    assert found.item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_a_given_precision_is_used(name):
    factory, value_of = CASES[name]
    student, teacher = sides()
    root = np.random.default_rng(5).normal(size=(3, 3))
    precision = root @ root.T + np.eye(3)
    pairs = zip(student.reshape(-1, 3), teacher.reshape(-1, 3), strict=True)
    expected = np.mean([value_of(s, t, precision) for s, t in pairs])
    found = factory(precision=torch.tensor(precision))(torch.tensor(student), torch.tensor(teacher))
    assert found.item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(("ours", "plain"), [(mahalanobis_mse_loss, mse_loss), (mahalanobis_cosine_loss, cosine_loss)])
def test_with_the_identity_it_is_the_plain_loss(ours, plain):
    student, teacher = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    torch.testing.assert_close(ours(precision=torch.eye(4))(student, teacher), plain()(student, teacher))


@pytest.mark.parametrize("name", CASES)
def test_fewer_positions_than_features_and_a_constant_teacher_stay_finite(name):
    loss = CASES[name][0]()
    for teacher in (torch.randn(3, 64) * 100, torch.ones(3, 64)):
        student = torch.randn(3, 64, requires_grad=True)
        value = loss(student, teacher)
        value.backward()
        assert value.isfinite()
        assert student.grad.isfinite().all()


def test_a_loud_feature_does_not_drown_the_others():
    teacher = torch.randn(200, 2) * torch.tensor([1000.0, 1.0])
    quiet, loud = teacher.clone(), teacher.clone()
    quiet[:, 1] += 1.0  # one standard deviation
    loud[:, 0] += 1.0  # a thousandth of one
    loss = mahalanobis_mse_loss(shrinkage=0)
    assert loss(quiet, teacher).item() > 1e5 * loss(loud, teacher).item()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shrinkage": 1.5}, "shrinkage=1.5"),
        ({"eps": 0}, "eps=0"),
        ({"precision": torch.ones(3)}, r"precision is \[3\]"),
        ({"precision": [[1.0]]}, "precision is list"),
        ({"precision": -torch.eye(3)}, "positive definite"),
        ({"precision": torch.tensor([[2.0, 1.0], [0.0, 2.0]])}, "symmetric"),
    ],
)
def test_options_that_cannot_work_are_refused(options, message):
    for factory, _ in CASES.values():
        with pytest.raises(LossError, match=message):
            factory(**options)


def test_a_precision_of_another_size_is_refused():
    with pytest.raises(LossError, match=r"\[3, 3\].*4 features"):
        mahalanobis_mse_loss(precision=torch.eye(3))(torch.randn(2, 4), torch.randn(2, 4))
