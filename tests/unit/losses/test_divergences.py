"""The losses on logits against loops in numpy, and their temperature, vocabularies, precision and chunks."""

import logging
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from silverspoon_kd.errors import LossError
from silverspoon_kd.losses import jsd_loss, kl_divergence_loss, reverse_kl_loss

ALL = [kl_divergence_loss, reverse_kl_loss, jsd_loss]
MASK = [[1, 0, 1], [1, 1, 0]]


def softmax(logits, temperature):
    weights = [math.exp(value / temperature) for value in logits]
    return [weight / sum(weights) for weight in weights]


def kl(p, q):
    return sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True))


def jsd(p, q, beta):
    mixture = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]
    return beta * kl(p, mixture) + (1 - beta) * kl(q, mixture)


REFERENCES = {
    "forward": (kl_divergence_loss, {}, kl),
    "reverse": (reverse_kl_loss, {}, lambda p, q: kl(q, p)),
    "jsd": (jsd_loss, {}, lambda p, q: jsd(p, q, 0.5)),
    "jsd 0.1": (jsd_loss, {"beta": 0.1}, lambda p, q: jsd(p, q, 0.1)),
    "jsd 0": (jsd_loss, {"beta": 0}, kl),
    "jsd 1": (jsd_loss, {"beta": 1.0}, lambda p, q: kl(q, p)),
}


def reference(divergence, student, teacher, mask, temperature):
    values = [
        temperature**2 * divergence(softmax(teacher[at], temperature), softmax(student[at], temperature))
        for at in np.ndindex(student.shape[:-1])
        if mask[at]
    ]
    return sum(values) / len(values)


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("temperature", [1, 2.5])
@pytest.mark.parametrize("chunk_size", [0, 1, 4])
def test_equals_a_loop(name, temperature, chunk_size):
    factory, options, divergence = REFERENCES[name]
    student, teacher = np.random.normal(size=(2, 2, 3, 7)) * 3
    loss = factory(temperature=temperature, chunk_size=chunk_size, **options)
    found = loss(torch.tensor(student), torch.tensor(teacher), torch.tensor(MASK))
    assert found.item() == pytest.approx(
        reference(divergence, student, teacher, np.array(MASK), temperature), rel=1e-12
    )


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("chunk_size", [0, 4])
def test_the_gradient_written_by_hand_is_that_of_the_formula(name, chunk_size):
    factory, options, _ = REFERENCES[name]
    loss = factory(temperature=1.7, chunk_size=chunk_size, **options)
    student = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    teacher, mask = torch.randn(2, 3, 8, dtype=torch.float64), torch.tensor(MASK)  # a padded vocabulary as well
    assert torch.autograd.gradcheck(lambda x: loss(x, teacher, mask), student)


@pytest.mark.parametrize("factory", ALL)
def test_chunks_change_neither_value_nor_gradient(factory):
    student, teacher = torch.randn(3, 5, 40) * 4, torch.randn(3, 5, 40) * 4
    mask = torch.rand(3, 5) > 0.3
    results = []
    for chunk_size in (0, 1, 4, 7, 1000):
        leaf = student.clone().requires_grad_()
        value = factory(temperature=2.0, chunk_size=chunk_size)(leaf, teacher, mask)
        value.backward()
        results.append((value.detach(), leaf.grad))
    for value, grad in results[1:]:
        torch.testing.assert_close(value, results[0][0], rtol=1e-6, atol=0)
        torch.testing.assert_close(grad, results[0][1], rtol=1e-6, atol=1e-9)


def test_h_02_does_not_grow_with_the_length():
    rows = torch.randn(2, 1, 16), torch.randn(2, 1, 16)
    for factory in ALL:
        short, long = (factory()(*(side.repeat(1, length, 1) for side in rows)) for length in (8, 16))
        assert short.item() == pytest.approx(long.item(), rel=1e-6)
    student, teacher = torch.randn(2, 8, 16), torch.randn(2, 8, 16)
    found = kl_divergence_loss()(student, teacher).item()
    logs = student.log_softmax(-1), teacher.log_softmax(-1)
    elements = functional.kl_div(*logs, log_target=True, reduction="none")
    assert found == pytest.approx(elements.sum().item() / 2 / 8, rel=1e-5)  # torch's "batchmean" stops after the 2
    assert found == pytest.approx(elements.mean().item() * 16, rel=1e-5)


@pytest.mark.parametrize("factory", ALL)
def test_h_03_temperature_squared_keeps_the_gradient_in_size(factory):
    student, teacher = torch.randn(4, 8, 32), torch.randn(4, 8, 32)
    norms = []
    for temperature in (1, 4, 16):
        leaf = student.clone().requires_grad_()
        factory(temperature=temperature)(leaf, teacher).backward()
        norms.append(leaf.grad.norm().item())
    assert max(norms) < 2 * min(norms)
    # Without the factor the last would be 1/256 of the first. For high T it tends to the gradient of half the squared
    # difference of the centred logits, divided by the vocabulary (Hinton et al. 2015); a JSD of 1/2 has a quarter of
    # it.
    gap = (student - student.mean(-1, keepdim=True)) - (teacher - teacher.mean(-1, keepdim=True))
    limit = (gap / 32 / 32).norm().item()  # 32 positions, 32 tokens
    assert norms[-1] == pytest.approx(limit * (0.25 if factory is jsd_loss else 1), rel=0.1)


@pytest.mark.parametrize("factory", ALL)
@pytest.mark.parametrize("temperature", [0, -1, math.nan, math.inf, "hot", None])
def test_h_03_temperature_must_be_positive(factory, temperature):
    with pytest.raises(ValueError, match="temperature=.* above 0"):
        factory(temperature=temperature)


@pytest.mark.parametrize("options", [{"chunk_size": -1}, {"chunk_size": 1.5}, {"beta": 1.01}, {"beta": -0.1}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(LossError, match=f"{next(iter(options))}="):
        jsd_loss(**options)


@pytest.mark.parametrize("factory", ALL)
@pytest.mark.parametrize("sizes", [(60, 64), (64, 60)])
def test_h_06_padded_vocabularies_are_compared_on_what_they_share(factory, sizes, caplog):
    student, teacher = torch.randn(2, 3, sizes[0], requires_grad=True), torch.randn(2, 3, sizes[1])
    with caplog.at_level(logging.WARNING, logger="silverspoon_kd"):
        value = factory(temperature=2.0)(student, teacher)
    value.backward()
    cut = student.detach()[..., :60].clone().requires_grad_()
    expected = factory(temperature=2.0)(cut, teacher[..., :60].clone())
    expected.backward()
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(student.grad[..., :60], cut.grad)
    assert (student.grad[..., 60:] == 0).all()
    assert all(f"{sizes[0]} logits and the teacher {sizes[1]}" in message for message in caplog.messages)


def test_h_06_the_cut_is_logged_once(caplog):
    with caplog.at_level(logging.WARNING, logger="silverspoon_kd"):
        for _ in range(3):
            kl_divergence_loss()(torch.randn(2, 33), torch.randn(2, 35))
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("sizes", [(10, 21), (21, 10), (3000, 4025), (1, 3)])
def test_h_06_other_vocabularies_are_refused_with_both_sizes(sizes):
    with pytest.raises(ValueError, match=rf"student has {sizes[0]} logits and the teacher {sizes[1]}.*same tokenizer"):
        kl_divergence_loss()(torch.randn(2, 4, sizes[0]), torch.randn(2, 4, sizes[1]))


def test_h_06_a_gap_of_1024_rows_is_padding():
    assert kl_divergence_loss()(torch.randn(1, 4000), torch.randn(1, 5024)).isfinite()


def test_h_06_never_broadcasts():
    with pytest.raises(LossError, match=r"\[2, 4, 8\].*\[2, 1, 8\]"):
        kl_divergence_loss()(torch.randn(2, 4, 8), torch.randn(2, 1, 8))


@pytest.mark.parametrize("factory", ALL)
@pytest.mark.parametrize("dtypes", [(torch.bfloat16,) * 2, (torch.bfloat16, torch.float32), (torch.float16,) * 2])
def test_h_08_half_precision_logits_are_computed_in_float32(factory, dtypes):
    teacher = (torch.randn(4, 8, 500) * 8).to(dtypes[1])
    student = (teacher + torch.randn(4, 8, 500) * 1e-2).to(dtypes[0]).requires_grad_()
    value = factory()(student, teacher)
    value.backward()
    exact = factory()(student.detach().double(), teacher.double()).item()
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(exact, rel=1e-2)
    assert value.item() >= 0
    assert student.grad.dtype == dtypes[0]
    assert student.grad.isfinite().all()


@pytest.mark.parametrize("factory", ALL)
def test_h_08_a_tiny_divergence_survives_float32(factory):
    # The sum of p (log p - log q) cancels: with these logits its rounding is larger than its value.
    teacher = torch.randn(2, 4, 50_000) * 5
    student = teacher + torch.randn(2, 4, 50_000) * 1e-4
    value = factory()(student, teacher).item()
    exact = factory()(student.double(), teacher.double()).item()
    assert exact < 1e-8
    assert value == pytest.approx(exact, rel=1e-2)


def test_h_08_autocast_does_not_reach_the_loss():
    student, teacher = torch.randn(2, 3, 50, requires_grad=True), torch.randn(2, 3, 50)
    expected = jsd_loss()(student, teacher)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(jsd_loss()(student, teacher), expected)


def test_float16_gradients_are_rounded_after_the_loss_scale():
    # Unscaled, most of these gradients are below the smallest float16 number.
    student, teacher = torch.randn(1, 8, 20_000).half(), torch.randn(1, 8, 20_000).half()
    leaf, exact = student.clone().requires_grad_(), student.double().requires_grad_()
    (kl_divergence_loss()(leaf, teacher) * 2.0**16).backward()
    kl_divergence_loss()(exact, teacher.double()).backward()
    torch.testing.assert_close(leaf.grad.double() / 2**16, exact.grad, rtol=2e-3, atol=1e-11)


def test_h_09_a_copy_of_the_teacher_has_no_loss():
    teacher = torch.randn(2, 8, 64)
    for factory in ALL:
        assert 0 <= factory(temperature=3.0)(teacher.clone(), teacher).item() < 1e-7


def test_h_09_order_and_logarithms_follow_the_formula():
    teacher = torch.randn(2, 8, 64)
    student = teacher.clone()
    student[..., 5] += 1.5
    p, log_p, log_q = teacher.softmax(-1).double(), teacher.double().log_softmax(-1), student.double().log_softmax(-1)
    forward = (p * (log_p - log_q)).sum(-1).mean().item()
    reverse = (log_q.exp() * (log_q - log_p)).sum(-1).mean().item()
    assert abs(forward - reverse) > 1e-3
    assert kl_divergence_loss()(student, teacher).item() == pytest.approx(forward, rel=1e-5)
    assert reverse_kl_loss()(student, teacher).item() == pytest.approx(reverse, rel=1e-5)


@pytest.mark.parametrize("factory", ALL)
@given(
    rows=st.lists(st.lists(st.floats(-80, 80, width=32), min_size=6, max_size=6), min_size=2, max_size=6),
    temperature=st.sampled_from([0.5, 1.0, 4.0]),
)
def test_h_09_never_negative(factory, rows, temperature):
    logits = torch.tensor(rows)
    values = factory(temperature=temperature)(logits[:-1], logits[1:])
    assert 0 <= values.item() < math.inf


@pytest.mark.parametrize("shift", [200.0, -200.0])
def test_far_logits_do_not_overflow(shift):
    student, teacher = torch.zeros(1, 3), torch.tensor([[0.0, 0.0, shift]])
    for factory, options, divergence in REFERENCES.values():
        wide = [[float(x) for x in side[0]] for side in (student, teacher)]
        # In exact arithmetic no probability is 0; exp(-200) is a fine float64.
        expected = divergence(softmax(wide[1], 1), softmax(wide[0], 1))
        assert factory(**options)(student, teacher).item() == pytest.approx(expected, rel=1e-5)


def test_tokens_ruled_out_on_both_sides_contribute_nothing():
    student, teacher = torch.randn(2, 5), torch.randn(2, 5)
    ruled_out = torch.tensor([[0.0, 0.0, -math.inf, 0.0, -math.inf]])
    kept = [0, 1, 3]
    for factory in ALL:
        leaf = (student + ruled_out).requires_grad_()
        value = factory()(leaf, teacher + ruled_out)
        value.backward()
        torch.testing.assert_close(value, factory()(student[:, kept], teacher[:, kept]))
        assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("loss", [kl_divergence_loss(), jsd_loss(beta=0.3)])
def test_tokens_ruled_out_by_the_teacher_alone(loss):
    # The rule of a padded vocabulary in the teacher: probability exactly 0, where the student still has some.
    student, teacher = torch.randn(2, 5), torch.randn(2, 5)
    teacher[:, 3:] = -math.inf
    nearly = teacher.clamp(min=-200)
    leaf, other = student.clone().requires_grad_(), student.clone().requires_grad_()
    value, expected = loss(leaf, teacher), loss(other, nearly)
    (value + expected).backward()
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(leaf.grad, other.grad)


def test_logits_that_are_no_contiguous_tensor():
    student, teacher = torch.randn(2, 6, 9, requires_grad=True), torch.randn(9, 2, 6)
    loss = kl_divergence_loss(chunk_size=3)
    value = loss(student[:, 1:], teacher.permute(1, 2, 0)[:, 1:])
    value.backward()
    expected = loss(student.detach()[:, 1:].contiguous(), teacher.permute(1, 2, 0)[:, 1:].contiguous())
    assert torch.equal(value.detach(), expected)
    assert (student.grad[:, 0] == 0).all()
    assert (student.grad[:, 1:] != 0).all()
