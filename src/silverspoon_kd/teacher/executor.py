"""What every placement offers: start a teacher run for a batch, take activations from it."""

import abc
from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor

from silverspoon_kd.capture import Tap
from silverspoon_kd.errors import DataError
from silverspoon_kd.teacher.facts import TeacherFacts


class TeacherRun(abc.ABC):
    """One teacher forward in flight."""

    @abc.abstractmethod
    def take(self, tap: Tap) -> Tensor:
        """Return an activation. The only place in the package that may wait for the teacher."""

    @abc.abstractmethod
    def costs(self) -> Mapping[str, float]:
        """Return what the taking has cost so far, by the name in the log; nothing for a teacher in this process."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of everything that was not taken."""


class TeacherExecutor(abc.ABC):
    """A placed teacher."""

    @abc.abstractmethod
    def start(self, batch: Mapping[str, Any]) -> TeacherRun:
        """Start the forward of a batch and return at once where the placement allows it."""

    @abc.abstractmethod
    def leave(self, error: Exception) -> NoReturn:
        """Raise the error that ended a training, or the teacher's own if that is behind it."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release hooks, devices and processes."""


class PreparedTeacher(abc.ABC):
    """A teacher of which everything is known, before it is frozen and put to work."""

    facts: TeacherFacts

    @abc.abstractmethod
    def place(self) -> TeacherExecutor:
        """Put the teacher where it will live."""

    @abc.abstractmethod
    def abandon(self) -> None:
        """Let go of it, since something else went wrong."""


def check_ids(inputs: Mapping[str, Any], vocab_size: int | None) -> None:
    """Catch token ids beyond the teacher's embeddings on CPU, where looking costs no synchronisation.

    Raises:
        DataError: there is one.
    """
    ids = inputs.get("input_ids")
    if vocab_size is None or not isinstance(ids, Tensor) or ids.device.type != "cpu" or ids.numel() == 0:
        return
    largest = int(ids.max())
    if largest >= vocab_size:
        raise DataError(
            f"The batch holds the token id {largest}, but the teacher's vocabulary has {vocab_size} entries. Teacher "
            "and student must use the same tokenizer."
        )
