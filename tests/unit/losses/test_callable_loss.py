"""A user's own function as a loss."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional

from silverspoon_kd.errors import LossError
from silverspoon_kd.losses import CallableLoss, get_loss_function, kl_divergence_loss, mse_loss

MASK = torch.tensor([[1, 1, 0], [0, 1, 0]])


class Recorder:
    """A mean squared error that keeps what it was given."""

    def __init__(self):
        self.calls = []

    def __call__(self, student, teacher):
        self.calls.append((student, teacher))
        return (student - teacher).square().mean()


def test_g_15_the_student_comes_first_and_the_teacher_has_no_gradient():
    record = Recorder()
    student, teacher = torch.zeros(2, 3, 4, requires_grad=True), torch.ones(2, 3, 4, requires_grad=True)
    get_loss_function(record)(student, teacher).backward()
    ((first, second),) = record.calls
    assert torch.equal(first, student) and first.requires_grad
    assert torch.equal(second, teacher) and not second.requires_grad
    assert teacher.grad is None


@pytest.mark.parametrize(
    ("function", "came_back"),
    [
        (lambda s, t: (s - t).square(), r"shape \[2, 3, 4\]; reduce it"),
        (lambda s, t: (s - t).square().sum(-1), r"shape \[2, 3\]; reduce it"),
        (lambda s, t: (s - t).square().mean().item(), "a float"),
        (lambda s, t: None, "a NoneType"),
        (lambda s, t: {"loss": (s - t).mean()}, "a dict"),
        (lambda s, t: (s.detach() - t).square().mean(), "without a gradient"),
        (lambda s, t: t.mean(), "without a gradient"),
    ],
)
def test_g_15_what_is_no_differentiable_scalar_is_refused(function, came_back):
    loss = get_loss_function(function)
    with pytest.raises(ValueError, match=f"must return a scalar tensor.*{came_back}"):
        loss(torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 3, 4))


def test_g_15_one_element_counts_as_a_scalar():
    loss = get_loss_function(lambda s, t: (s - t).square().mean().reshape(1, 1))
    value = loss(torch.ones(2, 3, requires_grad=True), torch.zeros(2, 3))
    assert value.dim() == 0
    assert value.item() == 1


def test_g_15_no_gradient_is_needed_in_evaluation():
    with torch.no_grad():
        assert get_loss_function(functional.mse_loss)(torch.ones(2, 3), torch.zeros(2, 3)).item() == 1


def test_without_a_mask_tensors_keep_their_shape():
    record = Recorder()
    result = CallableLoss(record).sum_and_count(torch.ones(2, 3, 4), torch.zeros(2, 3, 4))
    assert record.calls[0][0].shape == record.calls[0][1].shape == (2, 3, 4)
    assert (result.total.item(), result.count.item()) == (6, 6)


def test_with_a_mask_only_valid_positions_are_given():
    record = Recorder()
    student, teacher = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    value = CallableLoss(record)(student, teacher, MASK)
    assert torch.equal(record.calls[0][0], torch.stack([student[0, 0], student[0, 1], student[1, 1]]))
    assert torch.equal(record.calls[0][1], torch.stack([teacher[0, 0], teacher[0, 1], teacher[1, 1]]))
    torch.testing.assert_close(value, mse_loss()(student, teacher, MASK))


@pytest.mark.parametrize("given", [MASK, MASK.bool(), None])
def test_a_mask_parameter_gets_whole_tensors_and_a_bool_mask(given):
    seen = []

    def loss(student, teacher, *, mask):
        seen.append((student, teacher, mask))
        return ((student - teacher).square().mean(-1) * mask).sum() / mask.sum()

    student, teacher = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    value = CallableLoss(loss)(student, teacher, given)
    keep = torch.ones(2, 3, dtype=torch.bool) if given is None else MASK.bool()
    assert torch.equal(seen[0][2], keep)
    assert torch.equal(seen[0][0], student * keep[..., None])
    torch.testing.assert_close(value, mse_loss()(student, teacher, given))


def test_half_precision_is_widened_before_the_function():
    record = Recorder()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        CallableLoss(record)(torch.ones(2, 3).bfloat16(), torch.zeros(2, 3))
        product = CallableLoss(lambda s, t: (s @ t.T).mean())(torch.randn(4, 4), torch.randn(4, 4))
    assert [side.dtype for side in record.calls[0]] == [torch.float32] * 2
    assert product.dtype == torch.float32


def test_keyword_arguments_are_bound():
    loss = get_loss_function(functional.smooth_l1_loss, beta=0.5)
    assert isinstance(loss.function, functools.partial)
    student, teacher = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    torch.testing.assert_close(loss(student, teacher), get_loss_function("smooth_l1", beta=0.5)(student, teacher))


def test_a_module_works_and_its_forward_is_asked_for_the_mask():
    class Masked(nn.Module):
        def forward(self, student, teacher, scale=1.0, mask=None):
            return scale * ((student - teacher).square().mean(-1) * mask).sum() / mask.sum()

    student, teacher = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    expected = mse_loss()(student, teacher, MASK)
    torch.testing.assert_close(get_loss_function(nn.MSELoss())(student, teacher, MASK), expected)
    torch.testing.assert_close(get_loss_function(Masked())(student, teacher, MASK), expected)
    torch.testing.assert_close(get_loss_function(Masked(), scale=3.0)(student, teacher, MASK), 3 * expected)


@pytest.mark.parametrize("sizes", [(60, 64), (64, 60)])
def test_h_06_logits_are_cut_to_what_both_sides_share(sizes):
    def soft(student, teacher):
        logs = student.log_softmax(-1), teacher.log_softmax(-1)
        return functional.kl_div(*logs, log_target=True, reduction="batchmean")

    loss = get_loss_function(soft, positions="targets")
    assert loss.positions == "targets"
    student, teacher = torch.randn(2, 3, sizes[0]), torch.randn(2, 3, sizes[1])
    torch.testing.assert_close(loss(student, teacher, MASK), kl_divergence_loss()(student, teacher, MASK))
    with pytest.raises(LossError, match="60 logits and the teacher 200"):
        loss(torch.randn(2, 3, 60), torch.randn(2, 3, 200))


def test_positions_belongs_to_the_function_if_it_has_such_a_parameter():
    def loss(student, teacher, positions="all"):
        return (student - teacher).square().mean() * (2 if positions == "twice" else 1)

    wrapped = get_loss_function(loss, positions="twice")
    assert wrapped.positions == "tokens"
    assert wrapped(torch.ones(1, 2), torch.zeros(1, 2)).item() == 2


def test_positions_must_be_known():
    with pytest.raises(LossError, match="positions='labels'.*'tokens' or 'targets'"):
        CallableLoss(functional.mse_loss, positions="labels")


def one_argument(student):
    return student.mean()


def two_masks(student, teacher, weights):
    return (student - teacher).mean()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (one_argument, "one_argument.*cannot be called as"),
        (two_masks, "two_masks.*missing a required argument: 'weights'"),
        (nn.MSELoss, "class MSELoss; pass an instance"),
        (3, "not 3"),
        (None, "not None"),
    ],
)
def test_g_15_a_wrong_signature_is_found_before_training(function, message):
    with pytest.raises(ValueError, match=message):
        get_loss_function(function)


def test_g_15_unknown_keyword_arguments_name_the_accepted_ones():
    def loss(student, teacher, power=2.0, *, mask=None):
        return (student - teacher).abs().pow(power).mean()

    with pytest.raises(
        LossError, match=r"'loss' has no keyword argument 'powers'\. Did you mean 'power'\? Accepted are: power"
    ):
        get_loss_function(loss, powers=3)
    with pytest.raises(LossError, match="no keyword argument 'teacher'"):
        get_loss_function(loss, teacher=3)
