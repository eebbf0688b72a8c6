"""From terms to the loss."""

from collections.abc import Sequence

import torch
from torch import Tensor

from silverspoon_kd.objectives.terms import Counts, Term


def combine(
    terms: Sequence[Term], task: Term | None, counts: Counts, *, alpha: float, magnitude_aware: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss, fp32, and its detached parts by name.

    ``(1 - alpha) * sum(weight * term) + alpha * task``, where each term is its sum divided once by the count of its
    unit in the whole step. With ``magnitude_aware`` each distillation term is divided by its own detached value first,
    so that all weigh alike. The parts are values before weighting.
    """
    values = {term.name: _value(term, counts) for term in terms}
    parts = {name: value.detach() for name, value in values.items()}
    weighted = []
    for term in terms:
        value = values[term.name]
        if magnitude_aware:
            size = value.detach().abs()
            value = value / torch.where(size > 0, size, torch.ones_like(size))
        weighted.append(term.weight * value)
    loss = (1 - alpha) * torch.stack(weighted).sum()
    if task is not None:
        value = _value(task, counts)
        parts[task.name] = value.detach()
        loss = loss + alpha * value
    return loss, parts


def _value(term: Term, counts: Counts) -> Tensor:
    return term.total.float() * (counts.scale / counts.of(term.unit))
