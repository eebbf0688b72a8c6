"""A row of the table: what was checked, which number came out, and whether it is right."""

import json
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

BAD = ("WRONG", "FAILED")


@dataclass(frozen=True)
class Setting:
    """Where and how the checks run.

    Attributes:
        device: torch's name of the device type.
        quick: a few small checks of each kind.
        folder: for what the checks write.
    """

    device: str
    quick: bool
    folder: Path

    @property
    def small(self) -> bool:
        """Whether models are too small for their times to say much."""
        return self.quick or self.device == "cpu"

    @property
    def exact(self) -> float:
        """The largest relative error of fp32 numbers against float64 ones; kernels of a GPU add up in other orders."""
        return 1e-6 if self.device == "cpu" else 1e-5


@dataclass(frozen=True)
class Found:
    """What a check found.

    Attributes:
        value: a number.
        limit: the largest right one; None: it is only shown.
        note: for the reader.
    """

    value: float
    limit: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Row:
    """A finished check; ``status`` is "ok", "skipped", "WRONG" (the number) or "FAILED" (with an error)."""

    name: str
    status: str
    value: float | None = None
    limit: float | None = None
    note: str = ""
    seconds: float = 0.0


class Skipped(Exception):
    """Why a check cannot run here."""


Checks = Iterable[tuple[str, Callable[[], Found]]]


def run_checks(checks: Checks, written: Path) -> None:
    """Run one check after the other and append each row to a file; none keeps the others from running."""
    for name, check in checks:
        start = time.perf_counter()
        row = _run(name, check)
        with written.open("a") as file:
            file.write(json.dumps({**asdict(row), "seconds": time.perf_counter() - start}) + "\n")


def read_rows(written: Path) -> list[Row]:
    """Return the rows that were written so far."""
    return [Row(**json.loads(line)) for line in written.read_text().splitlines()] if written.exists() else []


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text."""
    cells = [("check", "", "found", "limit", "s", ""), *map(_cells, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(5)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) + "  " + row[5] for row in cells
    ]
    return "\n".join(line.rstrip() for line in lines)


def _run(name: str, check: Callable[[], Found]) -> Row:
    try:
        found = check()
    except Skipped as reason:
        return Row(name, "skipped", note=str(reason))
    except Exception as error:
        traceback.print_exc()
        return Row(name, "FAILED", note=f"{type(error).__name__}: {error}")
    # Not a number is not below any limit.
    right = found.limit is None or found.value <= found.limit
    return Row(name, "ok" if right else "WRONG", found.value, found.limit, found.note)


def _cells(row: Row) -> tuple[str, ...]:
    value, limit = ("" if number is None else f"{number:.3g}" for number in (row.value, row.limit))
    return row.name, row.status, value, limit, f"{row.seconds:.1f}", " ".join(row.note.split())
