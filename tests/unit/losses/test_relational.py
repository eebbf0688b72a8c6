"""Relational losses against loops over all pairs and triplets."""

import itertools

import numpy as np
import pytest
import torch

from silverspoon_kd.errors import LossError
from silverspoon_kd.losses import relkd_angle_loss, relkd_distance_angle_loss, relkd_distance_loss
from silverspoon_kd.losses.relational import even_subset

MASK = np.array([[1, 0, 1, 1], [1, 1, 1, 0]])


def huber(gap):
    return gap**2 / 2 if abs(gap) < 1 else abs(gap) - 0.5


def distance_wise(student, teacher):
    pairs = list(itertools.permutations(range(len(student)), 2))

    def relations(points):
        lengths = {(i, j): np.linalg.norm(points[i] - points[j]) for i, j in pairs}
        mean = sum(lengths.values()) / len(pairs)
        return {pair: length / mean for pair, length in lengths.items()}

    s, t = relations(student), relations(teacher)
    return sum(huber(s[pair] - t[pair]) for pair in pairs) / len(pairs)


def angle_wise(student, teacher):
    triplets = list(itertools.permutations(range(len(student)), 3))

    def cosine(points, i, j, k):
        a, b = points[i] - points[j], points[k] - points[j]
        return a @ b / (np.linalg.norm(a) * np.linalg.norm(b))

    return sum(huber(cosine(student, *at) - cosine(teacher, *at)) for at in triplets) / len(triplets)


CASES = {
    "distance": (relkd_distance_loss(), distance_wise),
    "angle": (relkd_angle_loss(), angle_wise),
    "both": (
        relkd_distance_angle_loss(distance_weight=0.5, angle_weight=3.0),
        lambda s, t: 0.5 * distance_wise(s, t) + 3 * angle_wise(s, t),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_a_loop(name):
    loss, reference = CASES[name]
    student, teacher = np.random.normal(size=(2, 2, 4, 5)) * 3
    where = MASK.astype(bool)
    result = loss.sum_and_count(torch.tensor(student), torch.tensor(teacher), torch.tensor(MASK))
    expected = reference(student[where], teacher[where])
    assert result.count.item() == 6
    assert result.total.item() == pytest.approx(6 * expected, rel=1e-10)
    assert loss(torch.tensor(student), torch.tensor(teacher)).item() == pytest.approx(
        reference(student.reshape(-1, 5), teacher.reshape(-1, 5)), rel=1e-10
    )


@pytest.mark.parametrize("name", CASES)
def test_rotation_and_scale_do_not_matter(name):
    teacher = torch.randn(3, 4, 5)
    rotation = torch.linalg.qr(torch.randn(5, 5)).Q
    assert CASES[name][0](3 * teacher @ rotation + 7, teacher).item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_valid", [0, 1, 2, 3])
def test_few_positions_give_finite_values_and_gradients(name, num_valid):
    student, teacher = torch.randn(1, 4, 5, requires_grad=True), torch.randn(1, 4, 5)
    value = CASES[name][0](student, teacher, torch.arange(4)[None] < num_valid)
    value.backward()
    assert student.grad.isfinite().all()
    if num_valid < (3 if name == "angle" else 2):
        assert value.item() == 0


@pytest.mark.parametrize("name", CASES)
def test_equal_positions_have_finite_gradients(name):
    student = torch.ones(1, 4, 5, requires_grad=True)
    value = CASES[name][0](student, torch.randn(1, 4, 5))
    value.backward()
    assert value.isfinite()
    assert student.grad.isfinite().all()


@pytest.mark.parametrize(("limit", "expected"), [(3, [1, 3, 5]), (4, [1, 2, 4, 5]), (6, [1, 2, 3, 4, 5, 7]), (7, None)])
def test_a_subset_is_spread_evenly_over_the_valid_positions(limit, expected):
    rows = torch.arange(9.0)[:, None]
    valid = torch.tensor([0, 1, 1, 1, 1, 1, 0, 1, 0], dtype=torch.bool)
    student, teacher, kept = even_subset(rows, -rows, valid, limit)
    assert len(student) == limit
    assert student[kept].flatten().tolist() == (expected or [1, 2, 3, 4, 5, 7])
    assert torch.equal(teacher, -student)


@pytest.mark.parametrize("factory", [relkd_distance_loss, relkd_angle_loss, relkd_distance_angle_loss])
def test_max_positions_limits_the_pairs_but_not_the_count(factory):
    student, teacher = torch.randn(2, 10, 5), torch.randn(2, 10, 5)
    result = factory(max_positions=5).sum_and_count(student, teacher)
    chosen = [0, 4, 8, 12, 16]
    expected = factory()(student.reshape(20, 5)[chosen], teacher.reshape(20, 5)[chosen])
    assert result.count.item() == 20
    torch.testing.assert_close(result.mean(), expected)
    torch.testing.assert_close(factory(max_positions=0)(student, teacher), factory(max_positions=20)(student, teacher))


def test_options_out_of_range_are_refused():
    for factory in (relkd_distance_loss, relkd_angle_loss, relkd_distance_angle_loss):
        with pytest.raises(LossError, match="max_positions=-1"):
            factory(max_positions=-1)
    with pytest.raises(LossError, match="angle_weight=-1"):
        relkd_distance_angle_loss(angle_weight=-1)
