"""Distillation of Llama-like models by hand, in float64, for tests to compare with. Imports nothing of the package.

Every row is cut to its real tokens and runs alone, so there is no padding, no batch and no mask but the causal one.
A step adds up sums over all its rows and divides each once by the number of its positions.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Pair:
    """Layer ``teacher`` teaches layer ``student``."""

    teacher: int
    student: int
    weight: float = 1.0
    input_projector: nn.Linear | None = None
    output_projector: nn.Linear | None = None

    @property
    def projectors(self) -> list[nn.Linear]:
        """Those there are."""
        return [each for each in (self.input_projector, self.output_projector) if each is not None]


@dataclass(frozen=True)
class Recipe:
    """What is computed; ``num_shares`` parts of each step have means of their own, which are averaged."""

    kind: str
    learning_rate: float
    pairs: Sequence[Pair] = ()
    alpha: float = 0.0
    temperature: float = 1.0
    label_smoothing: float = 0.0
    magnitude_aware: bool = False
    num_shares: int = 1
    max_grad_norm: float = 0.0


@dataclass
class Result:
    """The trained student, its projectors as given in the pairs, and the value of each term in each step."""

    student: nn.Module
    pairs: Sequence[Pair]
    losses: list[dict[str, float]] = field(default_factory=list)


def distil(teacher: nn.Module, student: nn.Module, recipe: Recipe, steps: Sequence[Sequence[Any]]) -> Result:
    """Train float64 copies of ``student`` and projectors with plain gradient descent.

    Args:
        teacher: the teacher.
        student: the student.
        recipe: what is computed.
        steps: the rows of each step: "input_ids" and "labels" of the real tokens.
    """
    teacher, student = copy.deepcopy(teacher).double().eval(), copy.deepcopy(student).double()
    pairs = copy.deepcopy(list(recipe.pairs))
    for projector in (each for pair in pairs for each in pair.projectors):
        projector.double()
    result = Result(student, pairs)
    for rows in steps:
        size = len(rows) // recipe.num_shares
        shares = [rows[start : start + size] for start in range(0, len(rows), size)]
        values = [_share(teacher, student, pairs, recipe, share) for share in shares]
        mean = {name: sum(value[name] for value in values) / len(values) for name in values[0]}
        _descend(mean["loss"], student, pairs, recipe)
        result.losses.append({name: float(value.detach()) for name, value in mean.items()})
    return result


def walk(model: nn.Module, ids: Tensor, replaced: Mapping[int, Tensor]) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Run a Llama-like model layer by layer.

    Args:
        model: the model.
        ids: ``[1, n]``.
        replaced: what a layer is given in place of the output of the layer before.

    Returns:
        The input of each layer, the output of each layer, and the logits ``[n, vocabulary]``.
    """
    base = model.model
    length = ids.shape[1]
    hidden = base.embed_tokens(ids)
    position_ids = torch.arange(length)[None]
    rotary = base.rotary_emb(hidden, position_ids)
    future = torch.triu(torch.full((length, length), float("-inf"), dtype=hidden.dtype), diagonal=1)[None, None]
    inputs, outputs = [], []
    for index, layer in enumerate(base.layers):
        hidden = replaced.get(index, hidden)
        inputs.append(hidden)
        hidden = layer(hidden, attention_mask=future, position_ids=position_ids, position_embeddings=rotary)
        outputs.append(hidden)
    return inputs, outputs, model.lm_head(base.norm(hidden))[0]


def kl_sum(student: Tensor, teacher: Tensor, labels: Sequence[int], temperature: float) -> tuple[Tensor, int]:
    """Sum KL(teacher || student) over the positions whose next label counts, and count them."""
    total, count = student.new_zeros(()), 0
    for position, label in enumerate(labels[1:]):
        if label != -100:
            p = torch.softmax(teacher[position] / temperature, dim=0)
            q = torch.softmax(student[position] / temperature, dim=0)
            total = total + temperature**2 * (p * (p.log() - q.log())).sum()
            count += 1
    return total, count


def cross_entropy_sum(logits: Tensor, labels: Sequence[int], smoothing: float) -> tuple[Tensor, int]:
    """Sum the cross entropy of the next labels, smoothed over the vocabulary, and count them."""
    total, count = logits.new_zeros(()), 0
    for position, label in enumerate(labels[1:]):
        if label != -100:
            surprise = -torch.log(torch.softmax(logits[position], dim=0))
            total = total + (1 - smoothing) * surprise[label] + smoothing * surprise.mean()
            count += 1
    return total, count


def mse_sum(student: Tensor, teacher: Tensor) -> tuple[Tensor, int]:
    """Sum the mean squared difference of each token of ``[1, n, width]`` features, and count the tokens."""
    return ((student - teacher) ** 2).sum() / student.shape[-1], student.shape[1]


def _share(
    teacher: nn.Module, student: nn.Module, pairs: Sequence[Pair], recipe: Recipe, rows: Sequence[Any]
) -> dict[str, Tensor]:
    """Return the value of each term of some rows, and "loss"."""
    sums: dict[str, Any] = {}
    counts: dict[str, int] = {}
    for row in rows:
        for name, (total, count) in _row(teacher, student, pairs, recipe, row).items():
            sums[name] = sums.get(name, 0) + total
            counts[name] = counts.get(name, 0) + count
    values = {name: sums[name] / max(counts[name], 1) for name in sums}
    weights = {f"model.layers.{pair.student}": pair.weight for pair in pairs}
    loss = torch.zeros((), dtype=torch.float64)
    for name, value in values.items():
        if name == "task":
            loss = loss + recipe.alpha * value
            continue
        size = float(value.detach()) if recipe.magnitude_aware else 1.0
        loss = loss + (1 - recipe.alpha) * weights.get(name, 1.0) * value / size
    return {**values, "loss": loss}


def _row(
    teacher: nn.Module, student: nn.Module, pairs: Sequence[Pair], recipe: Recipe, row: Any
) -> dict[str, tuple[Tensor, int]]:
    """Return sum and count of each term of one row."""
    ids = torch.tensor([row["input_ids"]])
    with torch.no_grad():
        teacher_in, teacher_out, teacher_logits = walk(teacher, ids, {})
    replaced = {}
    if recipe.kind == "blockwise":
        for pair in pairs:
            hidden = teacher_in[pair.teacher]
            replaced[pair.student] = hidden if pair.input_projector is None else pair.input_projector(hidden)
    _, student_out, logits = walk(student, ids, replaced)
    terms = {}
    if recipe.kind == "response":
        terms["logits"] = kl_sum(logits, teacher_logits, row["labels"], recipe.temperature)
    for pair in pairs:
        own = student_out[pair.student]
        own = own if pair.output_projector is None else pair.output_projector(own)
        terms[f"model.layers.{pair.student}"] = mse_sum(own, teacher_out[pair.teacher])
    if recipe.alpha > 0:
        terms["task"] = cross_entropy_sum(logits, row["labels"], recipe.label_smoothing)
    return terms


def _descend(loss: Tensor, student: nn.Module, pairs: Sequence[Pair], recipe: Recipe) -> None:
    """One step of gradient descent; each pair's gradient is clipped alone, then that of all other parameters."""
    groups = []
    for pair in pairs:
        modules = [student.model.layers[pair.student], *pair.projectors]
        groups.append([parameter for module in modules for parameter in module.parameters()])
    owned = {parameter for group in groups for parameter in group}
    groups.append([parameter for parameter in student.parameters() if parameter not in owned])
    everything = [parameter for group in groups for parameter in group]
    slopes = dict(zip(everything, torch.autograd.grad(loss, everything, allow_unused=True), strict=True))
    for group in groups:
        used = [parameter for parameter in group if slopes[parameter] is not None]
        norm = sum(float((slopes[parameter] ** 2).sum()) for parameter in used) ** 0.5
        factor = min(1.0, recipe.max_grad_norm / (norm + 1e-6)) if recipe.max_grad_norm else 1.0
        with torch.no_grad():
            for parameter in used:
                parameter -= recipe.learning_rate * factor * slopes[parameter]
