"""What a run logged, by quantity."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from silverspoon_kd.errors import ConfigurationError

STATE_FILE = "trainer_state.json"
RESULTS_FILE = "results.json"
TEXT_ONLY = "text-only"


@dataclass(frozen=True)
class Series:
    """Values of one quantity at rising steps."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class History:
    """Everything a report shows.

    Attributes:
        series: by logged name, such as ``loss``, ``loss/model.layers.0`` or ``eval_loss``.
        results: perplexities and the like from the command line; empty for a run of another kind.
        text_only: the loss of the student that was trained on the text alone; empty without one.
    """

    series: Mapping[str, Series]
    results: Mapping[str, Any]
    text_only: Series

    def named(self, quantity: str) -> dict[str, Series]:
        """Return the series of ``quantity/<alignment>`` by alignment, layer 10 after layer 9."""
        prefix = f"{quantity}/"
        names = sorted((name for name in self.series if name.startswith(prefix)), key=_natural)
        return {name.removeprefix(prefix): self.series[name] for name in names}


def read_history(folder: Path) -> History:
    """Read an output folder: ``trainer_state.json`` there or in its latest checkpoint, and ``results.json``.

    Raises:
        ConfigurationError: the folder has no log, or a file is damaged.
    """
    state_file = _state_file(folder)
    if state_file is None:
        raise ConfigurationError(
            f"{folder} has no {STATE_FILE}, not even in a checkpoint. Give the output_dir of a run that has logged."
        )
    series = _series(state_file)
    if not series:
        raise ConfigurationError(f"{state_file} holds no logged values. Train with logging_steps below the steps run.")
    results_file, text_only = folder / RESULTS_FILE, folder / TEXT_ONLY / STATE_FILE
    return History(
        series=series,
        results=_read(results_file) if results_file.is_file() else {},
        text_only=_series(text_only).get("loss", Series()) if text_only.is_file() else Series(),
    )


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _state_file(folder: Path) -> Path | None:
    if (folder / STATE_FILE).is_file():
        return folder / STATE_FILE
    found = [file for file in folder.glob(f"checkpoint-*/{STATE_FILE}") if file.parent.name.split("-")[-1].isdigit()]
    return max(found, key=lambda file: int(file.parent.name.split("-")[-1]), default=None)


def _series(file: Path) -> dict[str, Series]:
    entries = _read(file).get("log_history")
    if not isinstance(entries, list):
        raise ConfigurationError(f"{file} has no log_history; it was not written by a Trainer.")
    series: dict[str, Series] = {}
    for entry in entries:
        step = entry.get("step")
        for name, value in entry.items():
            if name in ("step", "epoch") or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            one = series.setdefault(name, Series())
            one.steps.append(int(step or 0))
            one.values.append(float(value) if math.isfinite(value) else math.nan)
    return series


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{file} is damaged: {error}.") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{file} is damaged: it holds no JSON object.")
    return content
