"""Values that stay on the device until they are logged."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import find_batch_size
from torch import Tensor

from silverspoon_kd.tree import map_tensors

logger = logging.getLogger(__name__)


class RunningMeans:
    """Sums of named 0-dim tensors; nothing waits for the device before :meth:`drain`."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._weight = 0.0

    def add(self, values: Mapping[str, Tensor], weight: float = 1.0) -> None:
        """Add one batch's values."""
        for name, value in values.items():
            value = value.detach().float() * weight
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        self._weight += weight

    def drain(self, gather: Callable[[Tensor], Tensor], divisor: float | None = None) -> dict[str, float]:
        """Return the means over all ranks and start anew.

        Args:
            gather: concatenates a ``[1, values]`` tensor over the ranks.
            divisor: what the sums are divided by; None: the added weights.
        """
        if not self._sums:
            return {}
        names = sorted(self._sums)
        stacked = torch.stack([self._sums[name] for name in names])
        rows = torch.cat([stacked, stacked.new_tensor([self._weight])])[None]
        rows = gather(rows).double()
        self._sums, self._weight = {}, 0.0
        total = rows[:, -1].sum() if divisor is None else torch.as_tensor(divisor * len(rows), device=rows.device)
        return dict(zip(names, (rows[:, :-1].sum(0) / total).tolist(), strict=True))


def not_finite(values: Mapping[str, float]) -> list[str]:
    """Return the names whose value is NaN or infinite."""
    return [name for name, value in values.items() if value != value or value in (float("inf"), float("-inf"))]


def own_rows(rows: int, accelerator: Accelerator) -> int:
    """Return how many of this rank's rows of a batch are its own: the last batch is filled up to be equal on all ranks.

    The same rows count that ``gather_for_metrics`` keeps, from which the Trainer takes its loss.
    """
    state = accelerator.gradient_state
    if not state.end_of_dataloader or state.remainder <= 0:
        return rows
    return min(max(state.remainder - accelerator.process_index * rows, 0), rows)


def own_part(batch: Any, accelerator: Accelerator) -> tuple[Any, Callable[[Any], Any]]:
    """Leave out of a batch the rows that only fill it up, which must not count in its loss.

    Returns:
        The batch, and what gives its outputs the full number of rows again: all ranks must have the same to be
        gathered, and ``gather_for_metrics`` drops what was added. A batch of nothing else stays as it is; the Trainer
        drops its loss.
    """
    rows = find_batch_size(batch) or 0
    own = own_rows(rows, accelerator)
    if own in (0, rows):
        return batch, lambda outputs: outputs

    def of_all(tensor: Tensor) -> bool:
        return tensor.dim() > 0 and len(tensor) == rows

    def of_own(tensor: Tensor) -> bool:
        return tensor.dim() > 0 and len(tensor) == own

    def fill(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor[-1:].expand(rows - own, *tensor.shape[1:])])

    part = map_tensors(lambda tensor: tensor[:own] if of_all(tensor) else tensor, batch)
    return part, partial(map_tensors, lambda tensor: fill(tensor) if of_own(tensor) else tensor)


def evaluation_logs(values: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Return the metrics of one evaluation by term; ``prefix`` is the data set's, such as "eval"."""
    whole = ("task", "end_to_end")
    return {f"{prefix}_{name}_loss" if name in whole else f"{prefix}_loss/{name}": values[name] for name in values}


def step_logs(
    values: Mapping[str, float], rates: Mapping[str, Any], norms: Mapping[str, Tensor], step: int
) -> dict[str, float]:
    """Return the entries of one log by alignment, and warn of terms that are not finite.

    Args:
        values: each term's loss.
        rates: each group's learning rate; empty where there is only the student's.
        norms: each group's gradient norm before clipping.
        step: the optimizer step.
    """
    bad = not_finite(values)
    if bad:
        logger.warning(
            "Step %d: the loss of %s is not finite; these modules are not updated, the others go on.",
            step,
            ", ".join(map(repr, bad)),
        )
    logs = {f"loss/{name}": value for name, value in values.items()}
    logs |= {f"learning_rate/{name}": float(rate) for name, rate in rates.items()}
    return logs | {f"grad_norm/{name}": float(norms[name]) for name in rates}
