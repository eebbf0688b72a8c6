"""Every error this package raises on purpose.

All derive from :class:`SilverSpoonError` and from the built-in that callers would catch anyway. A message says what was
asked, what is true here, and what to do.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class SilverSpoonError(Exception):
    """Base of all errors of this package."""


class ConfigurationError(SilverSpoonError, ValueError):
    """An argument, a file or a combination of them cannot work."""


class PlacementError(ConfigurationError):
    """The teacher cannot live where it was asked to live."""


class DeviceStateError(PlacementError, RuntimeError):
    """The devices of this process cannot be found out, or cannot be changed any more."""


class AlignmentError(ConfigurationError):
    """A teacher module and a student module cannot be aligned as asked."""


class LossError(SilverSpoonError, ValueError):
    """A loss is unknown, is configured wrongly, or returned something that is no loss."""


class DataError(ConfigurationError):
    """The data set or a batch lacks what training needs."""


class CheckpointError(SilverSpoonError, RuntimeError):
    """A checkpoint is incomplete, foreign or does not fit this run."""


class TeacherError(SilverSpoonError, RuntimeError):
    """The teacher cannot be loaded or failed while running."""


class TrainingError(SilverSpoonError, RuntimeError):
    """Training cannot go on without producing garbage."""


class MissingDependencyError(SilverSpoonError, ImportError):
    """An optional package is needed and not installed."""


def near_names(wanted: str, known: Iterable[str], limit: int = 3) -> str:
    """Return `` Did you mean 'a' or 'b'?`` for the known names closest to ``wanted``, or an empty string."""
    matches = get_close_matches(wanted, list(known), n=limit, cutoff=0.5)
    return f" Did you mean {' or '.join(repr(match) for match in matches)}?" if matches else ""
