"""What the user sees while a run goes on."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as TimeLeftColumn


class Display:
    """Progress bars on a terminal, a line now and then elsewhere, nothing on ranks other than 0."""

    def __init__(self, console: Console, *, visible: bool = True) -> None:
        self.console = console
        self._visible = visible

    def say(self, text: str) -> None:
        """Print a line."""
        if self._visible:
            self.console.print(text, highlight=False)

    @contextmanager
    def bar(self, title: str, total: int | None) -> Iterator["Bar"]:
        """Show a bar while the block runs."""
        progress = Progress(
            TextColumn("{task.description:<22}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeLeftColumn(),
            # Seconds; the time left needs two steps within this window, and a step may take minutes.
            speed_estimate_period=1800,
            console=self.console,
            disable=not self._visible or not self.console.is_terminal,
        )
        with progress:
            task = progress.add_task(title, total=total, note="")
            yield Bar(self, progress, task, title, total)


class Bar:
    """One bar, or the lines that stand for it where there is no terminal."""

    def __init__(self, display: Display, progress: Progress, task: TaskID, title: str, total: int | None) -> None:
        self._display, self._progress, self._task = display, progress, task
        self._title, self._total, self._note = title, total, ""
        self._done, self._said = 0, 0

    def note(self, text: str) -> None:
        """Show a short text beside the numbers."""
        self._note = text
        self._progress.update(self._task, note=text)

    def at(self, done: int, total: int | None = None) -> None:
        """Show how much is done."""
        self._done, self._total = done, self._total if total is None else total
        self._progress.update(self._task, completed=done, total=self._total)

    def line(self) -> None:
        """Print how much is done where there is no terminal, about ten times a bar."""
        if self._display.console.is_terminal or not self._total:
            return
        if self._done == self._total or 10 * (self._done - self._said) >= self._total:
            self._said = self._done
            self._display.say(self._line())

    def _line(self) -> str:
        task = self._progress.tasks[0]
        left = task.time_remaining
        shown = "" if left is None or self._done == self._total else f", {_minutes(left)} left"
        return f"{self._title} {self._done}/{self._total}{f'  {self._note}' if self._note else ''}{shown}"


class ProgressCallback(transformers.TrainerCallback):
    """Shows steps, loss and time left of a Trainer."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Note the loss."""
        if logs and "loss" in logs:
            self._bar.note(f"loss {float(logs['loss']):.3f}")
            self._bar.line()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Advance."""
        self._bar.at(state.global_step, state.max_steps)


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
