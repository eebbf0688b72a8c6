"""Values that stay on the device until they are logged."""

import logging
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

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
