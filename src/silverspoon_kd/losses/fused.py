"""Divergences of two language models from their final hidden states and output heads, without their logits.

The logits of one chunk of positions exist at a time, the teacher's beside the student's. The gradient of a chunk is
formed in the forward, while its logits are there, so each product with a head is computed once. What stays until the
backward has the shapes of the student's hidden states and of its head.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from silverspoon_kd.losses.base import LossSum
from silverspoon_kd.losses.divergences import JensenShannon, KLDivergence, ReverseKL
from silverspoon_kd.losses.inputs import full_precision
from silverspoon_kd.losses.output_head import OutputHead, check_heads, mixture_of

DEFAULT_CHUNK_BYTES = 2**27

# Logits whose intermediate results exist at once. On a CPU those of 1 MiB in float32 stay in its cache.
SLICE_ELEMENTS = {"cpu": 2**18}
SLICE_ELEMENTS_ELSEWHERE = 2**24

# exp(80) times a probability is still finite in float32; a token that is rarer by this factor on one side adds nothing.
MAX_LOG_RATIO = 80.0


def fused_divergence(
    loss: KLDivergence | ReverseKL | JensenShannon,
    student: Tensor,
    student_head: OutputHead,
    teacher: Tensor,
    teacher_head: OutputHead,
    mask: Tensor | None = None,
    *,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> LossSum:
    """Return ``loss.sum_and_count(student_head(student), teacher_head(teacher), mask)`` without whole logits.

    Gradients reach the student's hidden states and the weight and bias of its head, where they require one; nothing is
    computed for those that do not. The products with the heads run in the dtype of their inputs, or in autocast's; all
    else, and the sums over chunks, are float32 (float64 when everything is). On a CPU positions that do not count cost
    nothing.

    Memory: the logits of one chunk on both sides; a gradient of the student's hidden states and of its head in float32,
    the latter twice during the backward; for a half-precision head one product of its shape beside them.

    Args:
        loss: the divergence, its temperature, and its ``chunk_size`` in positions.
        student: final hidden states ``[*positions, hidden]``.
        student_head: what makes logits of them.
        teacher: as the student; the hidden size may differ. Gets no gradient, nor does its head.
        teacher_head: the teacher's; its vocabulary may differ from the student's by padding.
        mask: ``[*positions]``, bool or integer, non-zero where a position counts; None counts all.
        chunk_bytes: how large the logits of a chunk may be, both sides together, when ``loss.chunk_size`` is 0. The
            result does not depend on it; larger chunks are faster.

    Raises:
        LossError: the shapes or devices do not belong together, or ``loss`` is no divergence of this kind.
    """
    valid, vocabulary = check_heads(loss, student, student_head, teacher, teacher_head, mask, chunk_bytes)
    num_rows = valid.numel()
    rows, target = (side.reshape(num_rows, side.shape[-1]) for side in (student, teacher.detach()))
    valid = valid.reshape(num_rows)
    if mask is not None and _selects_rows(student.device):
        rows, target, valid = rows[valid], target[valid], valid[valid]
    elif mask is not None:
        # A NaN where nothing counts must reach neither a sum nor, as 0 * NaN, the head's gradient.
        rows, target = (side.where(valid[:, None], side.new_zeros(())) for side in (rows, target))
    sides = (
        _Side(student_head, _product_dtype(student, student_head), vocabulary, float(loss.temperature)),
        _Side(teacher_head.detached(), _product_dtype(teacher, teacher_head), vocabulary, float(loss.temperature)),
    )
    all_double = all(side.dtype == torch.float64 for side in sides)
    recipe = _Recipe(
        mixture=mixture_of(loss),
        student=sides[0],
        teacher=sides[1],
        target=target,
        valid=valid,
        dtype=torch.float64 if all_double else torch.float32,
        rows_per_chunk=int(loss.chunk_size) or _rows_in(chunk_bytes, vocabulary, sides),
        training=torch.is_grad_enabled(),
    )
    total = _FusedSum.apply(rows, student_head.weight, student_head.bias, recipe)
    return LossSum(total * loss.temperature**2, valid.sum().to(recipe.dtype))


def _selects_rows(device: torch.device) -> bool:
    """Tell whether rows may be chosen by a mask: elsewhere than on a CPU that would wait for the device."""
    return device.type == "cpu"


def _rows_in(chunk_bytes: int, vocabulary: int, sides: tuple["_Side", "_Side"]) -> int:
    return max(1, chunk_bytes // max(1, vocabulary * sum(side.dtype.itemsize for side in sides)))


def _product_dtype(hidden: Tensor, head: OutputHead) -> torch.dtype:
    dtype = torch.promote_types(hidden.dtype, head.weight.dtype)
    kind = hidden.device.type
    if dtype != torch.float64 and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return dtype


@dataclass(frozen=True, eq=False)
class _Side:
    """How one model's hidden states become log-probabilities."""

    head: OutputHead
    dtype: torch.dtype  # of the product with the head
    vocabulary: int  # logits that both sides share
    temperature: float

    def weight(self) -> Tensor:
        return self.head.weight.detach()[: self.vocabulary].to(self.dtype)

    def bias(self) -> Tensor | None:
        bias = self.head.bias
        return None if bias is None else bias.detach()[: self.vocabulary].to(self.dtype)

    def products(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        """Return the logits / T, or with a soft cap the tangent that is still to be multiplied by cap / T."""
        out = out[: len(hidden)]
        alpha = self.head.scale / (self.head.soft_cap or self.temperature)
        if bias is None:
            torch.addmm(out, hidden.to(self.dtype), weight.T, beta=0, alpha=alpha, out=out)
        else:
            torch.addmm(bias, hidden.to(self.dtype), weight.T, beta=alpha, alpha=alpha, out=out)
        return out.tanh_() if self.head.soft_cap else out

    def log_probs(self, products: Tensor, dtype: torch.dtype) -> Tensor:
        softened = products.to(dtype)
        if self.head.soft_cap:
            softened = softened * (self.head.soft_cap / self.temperature)
        found = softened.log_softmax(-1)
        # A bias may rule a token out with -inf. Its probability stays 0, but 0 * -inf would be NaN.
        return found if self.head.bias is None else found.clamp_(min=torch.finfo(dtype).min / 4)


def _divergence(log_q: Tensor, log_p: Tensor, mixture: float) -> tuple[Tensor, Tensor]:
    """Return D at each position ``[n]`` and its gradient by the student's softened logits ``[n, vocabulary]``.

    All three write differences of probabilities as p * expm1(log q - log p), which keeps small ones exact, and add
    q - p to the terms of a KL, which changes no sum and leaves no term negative.

    Args:
        log_q: the student's log-probabilities.
        log_p: the teacher's.
        mixture: weight of the teacher in the mixture; 0 for forward KL, 1 for reverse KL.
    """
    if mixture == 0:
        p, gap, ratio = _ratio(log_p, log_q)
        gradient = p * ratio  # q - p
        return ratio.sub_(gap).mul_(p).sum(-1).clamp_(min=0), gradient
    q, gap, ratio = _ratio(log_q, log_p)
    if mixture == 1:
        mean_gap = torch.linalg.vecdot(q, gap).unsqueeze(-1)
        value = ratio.sub_(gap).mul_(q).sum(-1).clamp_(min=0)
        return value, gap.neg_().add_(mean_gap).mul_(q)
    # m = q (1 + w); p log(p / m) and q log(q / m) share the logarithm. A mixture next to 1 would make w = -1.
    w = ratio.mul_(mixture).clamp_(min=torch.finfo(ratio.dtype).eps - 1)
    log_ratio = w.log1p()  # log m - log q
    terms = gap.mul_(w + mixture).addcmul_(w.add_(1), log_ratio, value=-1)
    value = torch.linalg.vecdot(q, terms).clamp_(min=0)
    mean = torch.linalg.vecdot(q, log_ratio).unsqueeze(-1)
    return value, log_ratio.neg_().add_(mean).mul_(q).mul_(1 - mixture)


def _ratio(log_a: Tensor, log_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a, log b - log a, and b / a - 1."""
    log_a = torch.maximum(log_a, log_b - MAX_LOG_RATIO)
    gap = log_b - log_a
    return log_a.exp_(), gap, gap.expm1()


@dataclass(frozen=True, eq=False)
class _Recipe:
    """How rows of hidden states become a sum and its gradients."""

    mixture: float
    student: _Side
    teacher: _Side
    target: Tensor  # the teacher's rows
    valid: Tensor  # [n], bool
    dtype: torch.dtype
    rows_per_chunk: int
    training: bool

    def run(self, rows: Tensor, gradients: "_Gradients") -> Tensor:
        """Return the sum of D over the valid rows and add to the gradients."""
        weight, bias = self.student.weight(), self.student.bias()
        teacher_weight, teacher_bias = self.teacher.weight(), self.teacher.bias()
        # Of its own precision: float16 would lose the small gradients, before any loss scale can save them.
        slope_dtype = torch.float32 if self.student.dtype == torch.float16 else self.student.dtype
        slope_weight = weight.to(slope_dtype) if gradients.hidden is not None else weight
        num_chunk = min(self.rows_per_chunk, len(rows))
        shape = (num_chunk, self.student.vocabulary)
        logits = rows.new_empty(shape, dtype=self.student.dtype)
        teacher_logits = rows.new_empty(shape, dtype=self.teacher.dtype)
        slopes = logits if slope_dtype == logits.dtype else rows.new_empty(shape, dtype=slope_dtype)
        values = rows.new_zeros(len(rows), dtype=self.dtype)
        for start in range(0, len(rows), num_chunk or 1):
            chunk = slice(start, start + num_chunk)
            hidden = rows[chunk]
            made = self.student.products(hidden, weight, bias, logits)
            target = self.teacher.products(self.target[chunk], teacher_weight, teacher_bias, teacher_logits)
            values[chunk] = self._values(made, target, slopes if gradients.any() else None)
            gradients.add(chunk, slopes[: len(hidden)], hidden, slope_weight, self.valid[chunk])
        return values.where(self.valid, values.new_zeros(())).sum()

    def _values(self, made: Tensor, target: Tensor, slopes: Tensor | None) -> Tensor:
        limit = SLICE_ELEMENTS.get(made.device.type, SLICE_ELEMENTS_ELSEWHERE)
        step = max(1, limit // max(1, self.student.vocabulary))
        values = made.new_empty(len(made), dtype=self.dtype)
        for start in range(0, len(made), step):
            part = slice(start, start + step)
            log_q = self.student.log_probs(made[part], self.dtype)
            log_p = self.teacher.log_probs(target[part], self.dtype)
            values[part], slope = _divergence(log_q, log_p, self.mixture)
            if slopes is None:
                continue
            if self.student.head.soft_cap:
                slope = slope.addcmul_(slope * made[part], made[part].to(slope.dtype), value=-1)
            slopes[start : start + len(slope)] = slope
        return values


@dataclass(frozen=True, eq=False)
class _Gradients:
    """Sums over chunks, None where no gradient is wanted."""

    hidden: Tensor | None  # [n, hidden]
    weight: Tensor | None  # [vocabulary, hidden]
    bias: Tensor | None  # [vocabulary]

    def any(self) -> bool:
        return any(each is not None for each in (self.hidden, self.weight, self.bias))

    def add(self, chunk: slice, slopes: Tensor, hidden: Tensor, weight: Tensor, valid: Tensor) -> None:
        vocabulary = slopes.shape[1]
        if self.hidden is not None:
            self.hidden[chunk] = slopes @ weight
        if self.weight is not None:
            shared = self.weight[:vocabulary]
            if slopes.dtype == shared.dtype:
                shared.addmm_(slopes.T, hidden.to(slopes.dtype))
            else:
                shared.add_(slopes.T @ hidden.to(slopes.dtype))
        if self.bias is not None:
            self.bias[:vocabulary] += (valid.to(slopes.dtype) @ slopes).to(self.bias.dtype)


class _FusedSum(torch.autograd.Function):
    """The sum of D over the valid rows; its gradients are made in the forward and scaled in the backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, recipe: _Recipe) -> Tensor:
        inputs = (rows, weight, bias)
        wanted = [recipe.training and needed for needed in ctx.needs_input_grad[:3]]
        sums = [
            torch.zeros_like(each, dtype=recipe.dtype) if each is not None and needed else None
            for each, needed in zip(inputs, wanted, strict=True)
        ]
        with full_precision(rows.device):
            total = recipe.run(rows, _Gradients(*sums))
        ctx.save_for_backward(*sums)
        ctx.dtypes = [None if each is None else each.dtype for each in inputs]
        # Softened logits are the head's products times scale / T.
        ctx.factor = recipe.student.head.scale / recipe.student.temperature
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        factor = grad_total * ctx.factor
        found = [
            None if each is None else (each * factor).to(dtype)
            for each, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*found, None)
