"""Batches are read, and teacher runs started, before the student comes to them."""

import random
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from silverspoon_kd.teacher import TeacherExecutor, TeacherRun
from silverspoon_kd.tree import tensors_in


@dataclass
class _Waiting:
    """A batch that was read, or the error of reading it, which is raised when it is due."""

    batch: Any
    error: Exception | None = None


class OwnDraws:
    """Random numbers for reading data, apart from the student's.

    A collator that masks at random and a student with dropout draw from the same generators. Reading ahead would change
    who draws first, and with it the numbers.
    """

    def __init__(self) -> None:
        self._state = _states()

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw from the generators of the data."""
        others = _states()
        _set_states(self._state)
        try:
            yield
        finally:
            self._state = _states()
            _set_states(others)


class Lookahead:
    """A queue between the Trainer's data and its steps.

    Args:
        executor: runs the teacher.
        steps: how many optimizer steps it may be ahead; 0: a run starts with the student's forward.
    """

    def __init__(self, executor: TeacherExecutor, steps: int) -> None:
        self._executor, self._steps = executor, steps
        self._draws = OwnDraws()
        self._source: Any = None
        self._waiting: deque[_Waiting] = deque()
        # By a tensor of the batch: the Trainer copies the dict around it.
        self._runs: dict[int, tuple[Any, TeacherRun]] = {}

    def next_batches(self, source: Iterator[Any], num_batches: int, per_step: int, steps_left: int) -> list[Any]:
        """Return the batches of a step, fewer at the end of the data.

        Args:
            source: of an epoch.
            num_batches: of this step.
            per_step: batches of a step.
            steps_left: of the training, with this one.

        Raises:
            Exception: what reading one of them raised.
        """
        if source is not self._source:
            self.drain()
            self._source = source
        wanted = num_batches + min(self._steps, max(steps_left - 1, 0)) * per_step
        while len(self._waiting) < wanted and self._read(source):
            pass
        due = [self._waiting.popleft() for _ in range(min(num_batches, len(self._waiting)))]
        for each in due:
            if each.error is not None:
                raise each.error
        return [each.batch for each in due]

    def run_of(self, batch: Mapping[str, Any]) -> TeacherRun:
        """Return the teacher's run of a batch, started now if it was not."""
        _, run = self._runs.pop(_key(batch), (None, None))
        return self._executor.start(batch) if run is None else run

    def drain(self) -> None:
        """Forget everything that was read and started ahead."""
        for _, run in self._runs.values():
            run.close()
        self._waiting.clear()
        self._runs.clear()
        self._source = None

    def _read(self, source: Iterator[Any]) -> bool:
        try:
            with self._draws.drawing():
                batch = next(source)
            if self._steps and _key(batch) not in self._runs:
                self._runs[_key(batch)] = batch, self._executor.start(batch)
            self._waiting.append(_Waiting(batch))
        except StopIteration:
            return False
        except Exception as error:
            self._waiting.append(_Waiting(None, error))
            return False
        return True


def _key(batch: Any) -> int:
    return id(next(iter(tensors_in(batch)), batch))


def _states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_states(states: tuple[Any, ...]) -> None:
    python, numpy, cpu = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
