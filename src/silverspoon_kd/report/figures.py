"""Figures as SVG text."""

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from silverspoon_kd.errors import MissingDependencyError
from silverspoon_kd.report.history import Series

_WIDTH, _HEIGHT = 8.6, 3.6  # inches
_APART = ["#d1495b", "#1f5f8b", "#3a9d6e", "#b07d1a", "#6b4c9a"]


def curves(series: Mapping[str, Series], ylabel: str) -> str:
    """Return a figure with a line for each series, as an ``<svg>`` element.

    The vertical axis is logarithmic where the positive values span more than a factor of 20. Many layers
    get the colours of a scale, in their order.
    """
    matplotlib = _matplotlib()
    # Text stays text: the page's fonts, a small file, and words that can be searched.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": ylabel, "font.size": 9}):
        figure = matplotlib.figure.Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
        axes = figure.add_subplot()
        for (name, one), colour in zip(series.items(), _colours(matplotlib, list(series)), strict=True):
            marker = "o" if len(one.steps) == 1 else None
            axes.plot(one.steps, one.values, label=_plain(name), color=colour, linewidth=1.5, marker=marker)
        if _spans(series, 20):
            axes.set_yscale("log")
        axes.set_xlabel("step")
        axes.set_ylabel(ylabel)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(True, color="0.9", linewidth=0.6)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        if len(series) > 1:
            axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8)
        content = io.StringIO()
        figure.savefig(content, format="svg", metadata={"Date": None, "Creator": None})
    text = content.getvalue()
    return text[text.index("<svg") :]


def _matplotlib() -> Any:
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError as error:
        raise MissingDependencyError(
            "A report needs matplotlib. Install it with: pip install 'silverspoon-kd[report]'."
        ) from error
    return matplotlib


def _colours(matplotlib: Any, names: Sequence[str]) -> list[Any]:
    """Return a colour a name: a scale for names with a number in them, which are layers in order, others apart."""
    apart = iter(_APART * len(names))
    numbered = [name for name in names if any(letter.isdigit() for letter in name)]
    if len(names) <= len(_APART):
        return [next(apart) for _ in names]
    scale = matplotlib.colormaps["viridis"]
    shades = iter(scale(0.92 * position / max(len(numbered) - 1, 1)) for position in range(len(numbered)))
    return [next(shades) if name in numbered else next(apart) for name in names]


def _spans(series: Mapping[str, Series], factor: float) -> bool:
    values = [value for one in series.values() for value in one.values if not math.isnan(value)]
    return bool(values) and min(values) > 0 and max(values) > factor * min(values)


def _plain(name: str) -> str:
    """Keep matplotlib from reading mathematics into a name, or hiding one that starts with an underscore."""
    return " " + name.replace("$", r"\$")
