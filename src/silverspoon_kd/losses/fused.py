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
from silverspoon_kd.losses.fused_slope import divergence_and_slope
from silverspoon_kd.losses.inputs import full_precision
from silverspoon_kd.losses.output_head import IGNORED, OutputHead, check_heads, check_labels, mixture_of

DEFAULT_CHUNK_BYTES = 2**27

# Logits whose intermediate results exist at once. On a CPU those of 1 MiB in float32 stay in its cache.
SLICE_ELEMENTS = {"cpu": 2**18}
SLICE_ELEMENTS_ELSEWHERE = 2**24


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
    sides = (student, student_head, teacher, teacher_head)
    rows, recipe, num_valid = _prepared(loss, *sides, mask, None, chunk_bytes)
    total, _ = _FusedSum.apply(rows, student_head.weight, student_head.bias, recipe)
    return LossSum(total * loss.temperature**2, num_valid)


def fused_task_and_divergence(
    loss: KLDivergence | ReverseKL | JensenShannon,
    student: Tensor,
    student_head: OutputHead,
    teacher: Tensor,
    teacher_head: OutputHead,
    mask: Tensor | None,
    task: "TaskLabels",
    *,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> "FusedLosses":
    """Return a divergence and the cross entropy of the student's logits with labels, which are made once for both.

    What :func:`fused_divergence` says holds here too. Since there is one gradient, of the weighted sum, the weights
    must be known before.

    Args:
        loss: as for :func:`fused_divergence`.
        student: as for :func:`fused_divergence`.
        student_head: as for :func:`fused_divergence`; the cross entropy is over its whole vocabulary.
        teacher: as for :func:`fused_divergence`.
        teacher_head: as for :func:`fused_divergence`.
        mask: of the divergence.
        task: labels and weights.
        chunk_bytes: as for :func:`fused_divergence`.

    Raises:
        LossError: as for :func:`fused_divergence`, or the labels are not one for each position.
    """
    sides = (student, student_head, teacher, teacher_head)
    rows, recipe, num_valid = _prepared(loss, *sides, mask, task, chunk_bytes)
    total, sums = _FusedSum.apply(rows, student_head.weight, student_head.bias, recipe)
    return FusedLosses(total, LossSum(sums[0] * loss.temperature**2, num_valid), sums[1])


@dataclass(frozen=True, eq=False)
class TaskLabels:
    """What the student's own loss is made of.

    Attributes:
        labels: ``[*positions]``, int64, of the token that each position is to predict; -100 for none.
        divergence_weight: factor of the divergence's sum in the loss, 0-dim.
        task_weight: factor of the sum of cross entropies, 0-dim.
    """

    labels: Tensor
    divergence_weight: Tensor
    task_weight: Tensor


@dataclass(frozen=True, eq=False)
class FusedLosses:
    """Two losses of one pass.

    Attributes:
        combined: their weighted sum, 0-dim; the only one with a gradient.
        divergence: sum and count of the divergence.
        task: sum of the cross entropies, 0-dim.
    """

    combined: Tensor
    divergence: LossSum
    task: Tensor


def _prepared(
    loss: KLDivergence | ReverseKL | JensenShannon,
    student: Tensor,
    student_head: OutputHead,
    teacher: Tensor,
    teacher_head: OutputHead,
    mask: Tensor | None,
    task: TaskLabels | None,
    chunk_bytes: int,
) -> tuple[Tensor, "_Recipe", Tensor]:
    """Return the student's rows, what is done with them, and at how many positions the divergence counts."""
    valid, shared = check_heads(loss, student, student_head, teacher, teacher_head, mask, chunk_bytes)
    num_rows = valid.numel()
    rows, target = (side.reshape(num_rows, side.shape[-1]) for side in (student, teacher.detach()))
    valid, labels = valid.reshape(num_rows), None
    wanted = valid
    if task is not None:
        labels = check_labels(loss, student, task.labels).reshape(num_rows)
        wanted = valid | (labels != IGNORED)
    num_valid, selects = valid.sum(), _selects_rows(student.device)
    # A NaN where nothing counts must reach neither a sum nor, as 0 * NaN, the head's gradient.
    if mask is not None and selects:
        rows, target, valid = rows[wanted], target[wanted], valid[wanted]
        labels = None if labels is None else labels[wanted]
    elif mask is not None:
        rows = rows.where(wanted[:, None], rows.new_zeros(()))
    if mask is not None and (task is not None or not selects):
        target = target.where(valid[:, None], target.new_zeros(()))
    size = shared if task is None else len(student_head.weight)
    sides = (
        _Side(student_head, _product_dtype(student, student_head), size, float(loss.temperature)),
        _Side(teacher_head.detached(), _product_dtype(teacher, teacher_head), shared, float(loss.temperature)),
    )
    dtype = torch.float64 if all(side.dtype == torch.float64 for side in sides) else torch.float32
    recipe = _Recipe(
        mixture=mixture_of(loss),
        student=sides[0],
        teacher=sides[1],
        target=target,
        valid=valid,
        labels=labels,
        weights=None if task is None else (task.divergence_weight.to(dtype), task.task_weight.to(dtype)),
        dtype=dtype,
        rows_per_chunk=int(loss.chunk_size) or _rows_in(chunk_bytes, size, sides),
        training=torch.is_grad_enabled(),
    )
    return rows, recipe, num_valid.to(dtype)


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

    def log_probs(self, products: Tensor, dtype: torch.dtype, temperature: float | None = None) -> Tensor:
        softened = products.to(dtype)
        temperature = temperature or self.temperature
        if self.head.soft_cap:
            softened = softened * (self.head.soft_cap / temperature)
        elif temperature != self.temperature:
            softened = softened * (self.temperature / temperature)
        found = softened.log_softmax(-1)
        # A bias may rule a token out with -inf. Its probability stays 0, but 0 * -inf would be NaN.
        return found if self.head.bias is None else found.clamp_(min=torch.finfo(dtype).min / 4)


@dataclass(frozen=True, eq=False)
class _Recipe:
    """How rows of hidden states become a sum and its gradients."""

    mixture: float
    student: _Side
    teacher: _Side
    target: Tensor  # the teacher's rows
    valid: Tensor  # [n], bool: where the divergence counts
    labels: Tensor | None  # [n]; IGNORED where the cross entropy does not count; None: only the divergence is asked for
    weights: tuple[Tensor, Tensor] | None  # of the divergence and the cross entropy, in what is returned
    dtype: torch.dtype
    rows_per_chunk: int
    training: bool

    def run(self, rows: Tensor, gradients: "_Gradients") -> tuple[Tensor, Tensor]:
        """Return the weighted sum, the sums of D and of the cross entropy ``[2]``, and add to the gradients."""
        weight, bias = self.student.weight(), self.student.bias()
        teacher_weight, teacher_bias = self.teacher.weight(), self.teacher.bias()
        # Of its own precision: float16 would lose the small gradients, before any loss scale can save them.
        slope_dtype = torch.float32 if self.student.dtype == torch.float16 else self.student.dtype
        slope_weight = weight.to(slope_dtype) if gradients.hidden is not None else weight
        num_chunk = min(self.rows_per_chunk, len(rows))
        shape = (num_chunk, self.student.vocabulary)
        logits = rows.new_empty(shape, dtype=self.student.dtype)
        teacher_logits = rows.new_empty((num_chunk, self.teacher.vocabulary), dtype=self.teacher.dtype)
        slopes = logits if slope_dtype == logits.dtype else rows.new_empty(shape, dtype=slope_dtype)
        values = rows.new_zeros((2, len(rows)), dtype=self.dtype)
        counted = self.valid if self.labels is None else torch.ones_like(self.valid)  # elsewhere slopes are 0
        for start in range(0, len(rows), num_chunk or 1):
            chunk = slice(start, start + num_chunk)
            hidden = rows[chunk]
            made = self.student.products(hidden, weight, bias, logits)
            target = self.teacher.products(self.target[chunk], teacher_weight, teacher_bias, teacher_logits)
            values[:, chunk] = self._values(chunk, made, target, slopes if gradients.any() else None)
            gradients.add(chunk, slopes[: len(hidden)], hidden, slope_weight, counted[chunk])
        valid = self.valid if self.labels is None else torch.stack([self.valid, self.labels != IGNORED])
        sums = values.where(valid, values.new_zeros(())).sum(1)
        if self.weights is None:
            return sums[0], sums
        return sums[0] * self.student.temperature**2 * self.weights[0] + sums[1] * self.weights[1], sums

    def _values(self, chunk: slice, made: Tensor, target: Tensor, slopes: Tensor | None) -> Tensor:
        """Return D and the cross entropy at each position of a chunk, ``[2, n]``; the slopes are written."""
        limit = SLICE_ELEMENTS.get(made.device.type, SLICE_ELEMENTS_ELSEWHERE)
        step = max(1, limit // max(1, self.student.vocabulary))
        values = made.new_zeros((2, len(made)), dtype=self.dtype)
        shared = self.teacher.vocabulary
        for start in range(0, len(made), step):
            part = slice(start, start + step)
            log_q = self.student.log_probs(made[part, :shared], self.dtype)
            log_p = self.teacher.log_probs(target[part], self.dtype)
            values[0, part], slope = divergence_and_slope(log_q, log_p, self.mixture)
            if self.labels is not None:
                there = slice(chunk.start + start, chunk.start + start + len(log_q))
                same = self.student.temperature == 1 and shared == self.student.vocabulary
                log_s = log_q if same else self.student.log_probs(made[part], self.dtype, temperature=1.0)
                values[1, part], slope = self._with_task(there, log_s, slope)
            if slopes is None:
                continue
            if self.student.head.soft_cap:
                slope = slope.addcmul_(slope * made[part], made[part].to(slope.dtype), value=-1)
            slopes[start : start + len(slope)] = slope
        return values

    def _with_task(self, rows: slice, log_probs: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cross entropy ``[n]`` and the slope of the weighted sum, by logits / T: ``[n, vocabulary]``."""
        assert self.labels is not None and self.weights is not None
        counts = self.labels[rows] != IGNORED
        labels = self.labels[rows].clamp(min=0).unsqueeze(-1)
        value = -log_probs.gather(-1, labels).squeeze(-1)
        temperature = self.student.temperature
        weight = (self.weights[1] * temperature * counts).unsqueeze(-1)
        own = log_probs.exp_().mul_(weight).scatter_add_(-1, labels, -weight)
        divergence_weight = (self.weights[0] * temperature**2 * self.valid[rows]).unsqueeze(-1)
        own[:, : slope.shape[1]].addcmul_(slope, divergence_weight)
        return value, own


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
    """The sum of D, or a weighted sum, over the valid rows; its gradients are made in the forward and then scaled."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, recipe: _Recipe) -> Any:
        inputs = (rows, weight, bias)
        wanted = [recipe.training and needed for needed in ctx.needs_input_grad[:3]]
        sums = [
            torch.zeros_like(each, dtype=recipe.dtype) if each is not None and needed else None
            for each, needed in zip(inputs, wanted, strict=True)
        ]
        with full_precision(rows.device):
            total, parts = recipe.run(rows, _Gradients(*sums))
        ctx.save_for_backward(*sums)
        ctx.dtypes = [None if each is None else each.dtype for each in inputs]
        # Softened logits are the head's products times scale / T.
        ctx.factor = recipe.student.head.scale / recipe.student.temperature
        ctx.mark_non_differentiable(parts)
        return total, parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        factor = grad_total * ctx.factor
        found = [
            None if each is None else (each * factor).to(dtype)
            for each, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*found, None)
