"""What holds for every loss, whatever it computes."""

import inspect
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, is_dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from silverspoon_kd.errors import LossError
from silverspoon_kd.losses import CallableLoss, Loss, available_losses, get_loss_function

FEATURES, HEADS, KEYS = 6, 2, 5


def masked_mean(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    gaps = (student - teacher).square().mean(-1)
    return (gaps * mask).sum() / mask.sum()


def make(name: str) -> Loss:
    loss = get_loss_function(name)
    if loss.needs_head:
        generator = torch.Generator().manual_seed(1)
        loss = loss.with_head(torch.randn(9, FEATURES, generator=generator, dtype=torch.float64))
    return loss


LOSSES: dict[str, Callable[[], Loss]] = {
    **{record.name: (lambda name=record.name: make(name)) for record in available_losses()},
    "jsd chunks": lambda: get_loss_function("jsd", beta=0.3, temperature=2.0, chunk_size=3),
    "relkd_da subset": lambda: get_loss_function("relkd_da", max_positions=4),
    "mahalanobis given": lambda: get_loss_function("mahal_mse", precision=2 * torch.eye(FEATURES)),
    "callable": lambda: CallableLoss(lambda student, teacher: (student - teacher).square().mean()),
    "callable with a mask": lambda: CallableLoss(masked_mean),
}
MASK = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [0, 0, 1, 1, 0]])
WAITS = {"callable"}  # selects positions, which a device can do only when it is asked how many
SIZES_MAY_DIFFER = {"attention", "kl_divergence", "reverse_kl", "jsd", "jsd chunks"}  # heads and vocabularies

every_loss = pytest.mark.parametrize("name", LOSSES)


@dataclass
class Sides:
    student: Tensor
    teacher: Tensor

    def as_dtype(self, dtype: torch.dtype) -> "Sides":
        return Sides(self.student.to(dtype), self.teacher.to(dtype))


def sides(loss: Loss, seed: int = 0, batch: int = 3, length: int = 5, dtype: torch.dtype = torch.float64) -> Sides:
    generator = torch.Generator().manual_seed(seed)
    maps = loss.layout == "attention"
    shape = (2, batch, HEADS, length, KEYS) if maps else (2, batch, length, FEATURES)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return Sides(*(values.softmax(-1) if maps else values)).as_dtype(dtype)


def at_positions(loss: Loss, mask: Tensor) -> Tensor:
    """Shape a mask ``[batch, length]`` so that it chooses in the loss's tensors."""
    return mask.bool()[:, None, :, None] if loss.layout == "attention" else mask.bool()[..., None]


def value_and_grad(
    loss: Loss, student: Tensor, teacher: Tensor, mask: Tensor | None, autocast: bool = False
) -> tuple[Tensor, Tensor]:
    leaf = student.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        value = loss(leaf, teacher, mask)
    value.backward()
    return value.detach(), leaf.grad


@every_loss
@pytest.mark.parametrize("masked", [False, True])
def test_gradient_is_right(name, masked):
    loss, mask = LOSSES[name](), MASK if masked else None
    pair = sides(loss)
    assert torch.autograd.gradcheck(lambda x: loss(x, pair.teacher, mask), pair.student.requires_grad_())


@every_loss
@pytest.mark.parametrize("rubbish", [torch.nan, torch.inf, 1e30])
def test_masked_positions_do_not_matter(name, rubbish):
    loss = LOSSES[name]()
    pair = sides(loss, dtype=torch.float32)
    expected = value_and_grad(loss, pair.student, pair.teacher, MASK)
    keep = at_positions(loss, MASK)
    student, teacher = (side.where(keep, torch.tensor(rubbish)) for side in (pair.student, pair.teacher))
    value, grad = value_and_grad(loss, student, teacher, MASK)
    assert torch.equal(value, expected[0])
    assert torch.equal(grad, expected[1])
    assert (grad.masked_select(~keep) == 0).all()


@every_loss
@pytest.mark.parametrize("rubbish", [0.0, torch.nan])
def test_fully_masked_gives_0_with_zero_gradients(name, rubbish):
    loss = LOSSES[name]()
    pair = sides(loss, dtype=torch.float32)
    value, grad = value_and_grad(loss, pair.student + rubbish, pair.teacher + rubbish, torch.zeros_like(MASK))
    assert value.item() == 0
    assert (grad == 0).all()
    assert loss.sum_and_count(pair.student, pair.teacher, torch.zeros_like(MASK)).count.item() == 0


@every_loss
def test_a_bool_mask_an_integer_mask_and_none_agree(name):
    loss = LOSSES[name]()
    pair = sides(loss)
    assert torch.equal(loss(pair.student, pair.teacher, MASK), loss(pair.student, pair.teacher, MASK.bool()))
    everywhere = loss(pair.student, pair.teacher, torch.ones_like(MASK))
    torch.testing.assert_close(loss(pair.student, pair.teacher), everywhere, rtol=1e-12, atol=0)


@every_loss
def test_sum_and_count_fit_together(name):
    loss = LOSSES[name]()
    for dtype in (torch.float32, torch.float64):
        pair = sides(loss, dtype=dtype)
        result = loss.sum_and_count(pair.student.requires_grad_(), pair.teacher, MASK)
        assert result.count.item() == MASK.sum()
        assert result.total.dtype == result.count.dtype == dtype
        assert result.total.dim() == result.count.dim() == 0
        assert result.total.requires_grad and not result.count.requires_grad
        torch.testing.assert_close(result.total / result.count, loss(pair.student, pair.teacher, MASK))


@every_loss
def test_the_teacher_gets_no_gradient(name):
    loss = LOSSES[name]()
    pair = sides(loss)
    teacher = pair.teacher.requires_grad_()
    loss(pair.student.requires_grad_(), teacher, MASK).backward()
    assert teacher.grad is None
    assert pair.student.grad.abs().sum() > 0


@every_loss
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(name, dtype):
    loss = LOSSES[name]()
    pair = sides(loss, dtype=dtype)
    wide = pair.as_dtype(torch.float32)
    value, grad = value_and_grad(loss, pair.student, pair.teacher, MASK, autocast=True)
    expected, wide_grad = value_and_grad(loss, wide.student, wide.teacher, MASK)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(grad, wide_grad.to(dtype), rtol=1e-2, atol=1e-6)
    mixed = loss(pair.student, wide.teacher, MASK)
    torch.testing.assert_close(mixed, expected, rtol=1e-6, atol=1e-7)


@every_loss
def test_h_08_small_differences_survive_half_precision(name):
    loss = LOSSES[name]()
    teacher = sides(loss).teacher.to(torch.bfloat16)
    student = (teacher.double() * (1 + 4e-3)).to(torch.bfloat16)  # about one step of bfloat16
    value = loss(student, teacher, MASK)
    exact = loss(student.double(), teacher.double(), MASK)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), exact, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("name", sorted(set(LOSSES) - WAITS))
def test_nothing_waits_for_the_device(name):
    loss = LOSSES[name]()
    shape = (3, HEADS, 5, KEYS) if loss.layout == "attention" else (3, 5, FEATURES)
    # A tensor on "meta" has no values, so asking for one is an error.
    student, teacher = (torch.empty(shape, device="meta") for _ in range(2))
    value = loss(student.requires_grad_(), teacher, torch.empty(3, 5, dtype=torch.int64, device="meta"))
    value.backward()
    assert value.device.type == "meta"


@every_loss
@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=3),
    padding=st.integers(0, 4),
    seed=st.integers(0, 2**31),
    left=st.booleans(),
)
def test_padding_changes_nothing(name, lengths, padding, seed, left):
    loss = LOSSES[name]()
    pair = sides(loss, seed=seed, batch=len(lengths))
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    dim = 2 if loss.layout == "attention" else 1

    def padded(side: Tensor) -> Tensor:
        extra = torch.rand(*side.shape[:dim], padding, *side.shape[dim + 1 :], dtype=side.dtype)
        return torch.cat([extra, side] if left else [side, extra], dim)

    no = torch.zeros(len(lengths), padding, dtype=torch.bool)
    found = loss.sum_and_count(
        padded(pair.student), padded(pair.teacher), torch.cat([no, mask] if left else [mask, no], 1)
    )
    expected = loss.sum_and_count(pair.student, pair.teacher, mask)
    torch.testing.assert_close(found.total, expected.total, rtol=1e-9, atol=1e-9)
    assert torch.equal(found.count, expected.count)


@every_loss
def test_micro_batches_add_up_where_positions_are_independent(name):
    loss = LOSSES[name]()
    pair = sides(loss)
    parts = [
        loss.sum_and_count(pair.student[rows], pair.teacher[rows], MASK[rows]) for rows in (slice(0, 1), slice(1, 3))
    ]
    whole = loss.sum_and_count(pair.student, pair.teacher, MASK)
    assert sum(part.count for part in parts).item() == whole.count.item()
    among_themselves = ("relkd", "cka", "contrastive", "mahalanobis_mse", "mahalanobis_cosine")
    if not name.startswith(among_themselves):
        torch.testing.assert_close(sum(part.total for part in parts), whole.total)


@every_loss
def test_other_shapes_are_refused_with_both(name):
    loss = LOSSES[name]()
    pair = sides(loss)
    with pytest.raises(LossError, match=r"\[3, .*\[1, "):
        loss(pair.student, pair.teacher[:1])
    with pytest.raises(LossError, match=r"mask \[5, 3\].*\[3, 5\]"):
        loss(pair.student, pair.teacher, MASK.T)
    with pytest.raises(LossError, match=r"mask \[1, 5\].*\[3, 5\]"):
        loss(pair.student, pair.teacher, MASK[:1])


@pytest.mark.parametrize("name", sorted(set(LOSSES) - SIZES_MAY_DIFFER))
def test_other_widths_are_refused(name):
    loss = LOSSES[name]()
    with pytest.raises(LossError, match=r"\[2, 3, 6\].*\[2, 3, 8\].*auto_projector"):
        loss(torch.randn(2, 3, 6), torch.randn(2, 3, 8))


@every_loss
def test_what_is_no_tensor_or_no_mask_is_refused(name):
    loss = LOSSES[name]()
    pair = sides(loss)
    with pytest.raises(LossError, match="teacher's value is a tuple.*output_selector_index"):
        loss(pair.student, (pair.teacher,))
    with pytest.raises(LossError, match=r"mask is torch\.float32.*bool or integer"):
        loss(pair.student, pair.teacher, MASK.float())


@pytest.mark.parametrize("name", [record.name for record in available_losses()])
def test_losses_are_final_frozen_and_documented(name):
    loss = get_loss_function(name)
    kind = type(loss)
    assert loss.name == kind.name == name
    assert is_dataclass(kind) and not inspect.isabstract(kind)
    assert kind.__final__
    with pytest.raises(FrozenInstanceError):
        loss.name = "other"
    text = inspect.getdoc(kind)
    assert "``" in text and "Shapes:" in text
    assert all(f"{field}:" in text for field in inspect.signature(kind).parameters)


@pytest.mark.parametrize("name", [record.name for record in available_losses()])
def test_losses_survive_pickling(name):
    loss = LOSSES[name]()
    pair = sides(loss)
    again = pickle.loads(pickle.dumps(loss))
    assert torch.equal(again(pair.student, pair.teacher, MASK), loss(pair.student, pair.teacher, MASK))


def test_logit_losses_ask_for_target_positions():
    on_targets = {record.name for record in available_losses() if get_loss_function(record.name).positions == "targets"}
    assert on_targets == {"kl_divergence", "reverse_kl", "jsd"}
    assert {record.name for record in available_losses() if get_loss_function(record.name).needs_head} == {
        "logit_lens_kl"
    }


def test_a_loss_of_ones_own_needs_one_method():
    class Absolute(Loss):
        def sum_and_count(self, student, teacher, mask=None):
            return get_loss_function("smooth_l1", beta=0).sum_and_count(student, teacher, mask)

    assert Absolute().name == "Absolute"
    assert Absolute()(torch.ones(2, 3), torch.zeros(2, 3)).item() == 1
    with pytest.raises(TypeError, match="abstract"):
        Loss()
