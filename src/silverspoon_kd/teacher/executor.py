"""What every placement offers: start a teacher run for a batch, take activations from it."""

import abc
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from silverspoon_kd.capture import Tap


class TeacherRun(abc.ABC):
    """One teacher forward in flight."""

    @abc.abstractmethod
    def take(self, tap: Tap) -> Tensor:
        """Return an activation. The only place in the package that may wait for the teacher."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of everything that was not taken."""


class TeacherExecutor(abc.ABC):
    """A placed teacher."""

    @abc.abstractmethod
    def start(self, batch: Mapping[str, Any]) -> TeacherRun:
        """Start the forward of a batch and return at once where the placement allows it."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release hooks, devices and processes."""
