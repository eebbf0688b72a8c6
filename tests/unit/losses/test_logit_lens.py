"""The logit lens against its formula."""

import pytest
import torch
from torch import nn

from silverspoon_kd.errors import LossError
from silverspoon_kd.losses import get_loss_function, kl_divergence_loss, logit_lens_kl_loss


def test_is_the_kl_of_the_predicted_tokens():
    head = torch.randn(11, 4, dtype=torch.float64)
    student, teacher = torch.randn(2, 2, 3, 4, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    values = []
    for at in mask.nonzero():
        p, q = (torch.softmax(head @ side[tuple(at)] / 2.0, 0) for side in (teacher, student))
        values.append(4.0 * sum(a * (a.log() - b.log()) for a, b in zip(p, q, strict=True)))
    for chunk_size in (0, 2):
        loss = get_loss_function("logit_lens_kl", temperature=2.0, chunk_size=chunk_size).with_head(head)
        assert loss(student, teacher, mask).item() == pytest.approx((sum(values) / 4).item(), rel=1e-12)


def test_gradient_flows_to_the_student_only():
    head = nn.Linear(4, 11, bias=False)
    student, teacher = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    logit_lens_kl_loss(head=head.weight)(student, teacher).backward()
    dense = student.detach().clone().requires_grad_()
    kl_divergence_loss()(dense @ head.weight.detach().T, teacher.detach() @ head.weight.detach().T).backward()
    torch.testing.assert_close(student.grad, dense.grad)
    assert teacher.grad is None
    assert head.weight.grad is None


def test_a_half_precision_head_is_used_in_float32():
    head = torch.randn(50, 8, dtype=torch.bfloat16)
    student, teacher = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    value = logit_lens_kl_loss(head=head)(student, teacher)
    exact = logit_lens_kl_loss(head=head.double())(student.double(), teacher.double())
    assert value.item() == pytest.approx(exact.item(), rel=1e-5)


def test_autocast_does_not_reach_the_head_forward_or_backward():
    head, teacher = torch.randn(50, 8), torch.randn(2, 5, 8)
    student = torch.randn(2, 5, 8)
    grads = []
    for enabled in (False, True):
        leaf = student.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            logit_lens_kl_loss(head=head)(leaf, teacher).backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


def test_without_a_head_it_says_what_is_missing():
    loss = logit_lens_kl_loss()
    assert loss.needs_head
    with pytest.raises(LossError, match="with_head"):
        loss(torch.randn(2, 4), torch.randn(2, 4))


def test_with_head_leaves_the_loss_as_it_was():
    loss = logit_lens_kl_loss(temperature=3.0)
    headed = loss.with_head(torch.randn(5, 4))
    assert loss.head is None
    assert headed.temperature == 3.0


def test_a_head_of_another_size_is_refused():
    with pytest.raises(LossError, match=r"\[5, 4\].*hidden states of size 4.*\[2, 3, 6\]"):
        logit_lens_kl_loss(head=torch.randn(5, 4))(torch.randn(2, 3, 6), torch.randn(2, 3, 6))
    with pytest.raises(LossError, match=r"\[5\].*matrix"):
        logit_lens_kl_loss(head=torch.randn(5))
    with pytest.raises(LossError, match="temperature=0"):
        logit_lens_kl_loss(temperature=0)
