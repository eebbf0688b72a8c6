"""Profiler traces and counts of floating-point operations, on request."""

import abc
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import TrainerCallback

from silverspoon_kd.training.arguments import TrainingArguments


class Instrument(TrainerCallback, abc.ABC):
    """Something that measures while training runs."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Stop measuring; also after a step that failed."""

    @abc.abstractmethod
    def logs(self) -> dict[str, float]:
        """Return what belongs in the log of a training step."""


def make_instruments(args: TrainingArguments) -> list[Instrument]:
    """Return the instruments that the arguments ask for."""
    instruments: list[Instrument] = []
    if args.count_flops:
        instruments.append(FlopsCallback())
    if args.enable_profiling:
        instruments.append(ProfilerCallback(args))
    return instruments


class FlopsCallback(Instrument):
    """Count the operations of each step: teacher and student, forward and backward, on this rank."""

    def __init__(self) -> None:
        self._counter: FlopCounterMode | None = None
        self._last, self._total = 0, 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._counter = FlopCounterMode(display=False)
        self._counter.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.stop()

    def stop(self) -> None:
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            self._last = self._counter.get_total_flops()
            self._total += self._last
            self._counter = None

    def logs(self) -> dict[str, float]:
        return {"flops/step": float(self._last), "flops/total": float(self._total)}


class ProfilerCallback(Instrument):
    """Write ``torch.profiler`` traces of some steps, one file a rank and cycle, for TensorBoard or Perfetto."""

    def __init__(self, args: TrainingArguments) -> None:
        self._folder = Path(args.profiling_output_dir or Path(args.output_dir) / "profile")
        self._schedule = torch.profiler.schedule(
            wait=args.profiling_wait,
            warmup=args.profiling_warmup,
            active=args.profiling_active,
            repeat=args.profiling_repeat,
        )
        self._with_stack, self._rank = args.profiling_with_stack, args.process_index
        self._profiler: torch.profiler.profile | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._profiler = torch.profiler.profile(
            schedule=self._schedule,
            on_trace_ready=torch.profiler.tensorboard_trace_handler(str(self._folder), f"rank{self._rank}"),
            with_stack=self._with_stack,
        )
        self._profiler.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._profiler is not None:
            self._profiler.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.stop()

    def stop(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def logs(self) -> dict[str, float]:
        return {}
