"""What a teacher process says when it fails, and the exception that a student makes of it."""

import builtins
import traceback
from contextlib import suppress
from typing import Any

import torch

from silverspoon_kd import errors
from silverspoon_kd.errors import TeacherError

Report = dict[str, Any]

# What the others of a world see when one of its processes is gone: true, but not the reason.
_BROKEN_WIRE = ("RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError")


class ReportedError(Exception):
    """Ends a teacher process whose failure is described already."""

    def __init__(self, report: Report) -> None:
        super().__init__(report["text"])
        self.report = report


def report_of(error: BaseException, where: str, *, alone: bool = True) -> Report:
    """Return a report as JSON takes it.

    Args:
        error: being handled.
        where: what was going on, for the reader of the message.
        alone: no other process can be the reason.
    """
    kind = type(error).__name__
    return {
        "type": kind,
        "text": str(error),
        "where": where,
        "traceback": traceback.format_exc(),
        "doubtful": not alone and kind in _BROKEN_WIRE,
    }


def ended_report(rank: int, pid: int, code: int) -> Report:
    """Return the report of a process that ended without a word; ``code`` is negative for a signal."""
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    text = f"The teacher process {rank} (pid {pid}) {how}."
    return {"type": "TeacherError", "text": text, "where": "", "traceback": "", "doubtful": False}


def error_of(report: Report) -> Exception:
    """Return the exception as itself where its type is a common one, caused by the teacher's own traceback."""
    name = report["type"]
    kind = getattr(errors, name, None) or getattr(builtins, name, None)
    kind = torch.OutOfMemoryError if name == "OutOfMemoryError" else kind
    text = " ".join(filter(None, [report["text"], report["where"]]))
    error: Exception = TeacherError(f"{name}: {text}")
    if isinstance(kind, type) and issubclass(kind, Exception):
        with suppress(TypeError):  # it may want more than a text
            error = kind(text)
    if report["traceback"]:
        error.__cause__ = TeacherError("The teacher process's own traceback:\n" + report["traceback"])
    return error
