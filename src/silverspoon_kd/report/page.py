"""The HTML page."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from silverspoon_kd.errors import ConfigurationError
from silverspoon_kd.report.figures import curves
from silverspoon_kd.report.history import History, Series, read_history

REPORT_FILE = "report.html"

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2733; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .3rem; }
p { margin: .3rem 0; color: #4a5a6a; }
table { border-collapse: collapse; margin: .6rem 0; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .25rem .9rem; border-bottom: 1px solid #dde4ea; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th { color: #4a5a6a; font-weight: 600; }
tr.best td { font-weight: 600; }
svg { width: 100%; height: auto; }
"""
_TITLES = {
    "teacher": "teacher",
    "student before": "student before training",
    "student after": "student after, distilled",
    "text alone": "same student, same steps, text alone",
}


def write_report(folder: str | os.PathLike[str]) -> Path:
    """Write ``report.html`` in the output folder of a run, and return its path.

    The page is one file that loads nothing: curves of the loss, in total and by alignment, of learning rates and
    gradient norms, and the table of held-out perplexities where the command line measured them.

    Args:
        folder: the ``output_dir`` of a run; it has ``trainer_state.json``, or a checkpoint has.

    Raises:
        ConfigurationError: there is nothing to report, or a file is damaged.
        MissingDependencyError: matplotlib is not installed.
    """
    target = Path(folder)
    if not target.is_dir():
        raise ConfigurationError(f"{target} is no folder. Give the output_dir of a run.")
    page = render(read_history(target), title=target.resolve().name)
    file, scratch = target / REPORT_FILE, target / f".{REPORT_FILE}.{os.getpid()}"
    scratch.write_text(page, "utf-8")
    scratch.replace(file)
    return file


def render(history: History, title: str) -> str:
    """Return the page as text."""
    sections = [
        f"<h1>Distillation: {escape(title)}</h1>",
        _summary(history.results),
        _perplexities(history.results),
        _losses(history),
        _by_alignment(history),
        _figure(_rates(history), "Learning rate", "learning rate"),
        _figure(history.named("grad_norm"), "Gradient norm by alignment", "gradient norm, before clipping"),
        _figure(_evaluation(history), "Evaluation", "value"),
        _times(history.results),
    ]
    body = "\n".join(section for section in sections if section)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _summary(results: Mapping[str, Any]) -> str:
    parts = []
    if results.get("steps"):
        parts.append(f"{results['steps']} steps")
    parts += [f"{number:,} tokens {escape(name)}" for name, number in results.get("tokens", {}).items()]
    parts += [
        f"{escape(name)} {number / 1e6:.1f} M parameters" for name, number in results.get("parameters", {}).items()
    ]
    if results.get("peak_memory"):
        parts.append(f"{results['peak_memory'] / 1e9:.1f} GB of memory at most")
    return f"<p>{', '.join(parts)}</p>" if parts else ""


def _perplexities(results: Mapping[str, Any]) -> str:
    values = results.get("perplexity", {})
    if not values:
        return ""
    before, alone = values.get("student before"), values.get("text alone")
    rows = [
        [_TITLES.get(name, name), _number(value), _ratio(value, before), _ratio(value, alone)]
        for name, value in values.items()
    ]
    best = list(values).index("student after") if "student after" in values else -1
    header = ["model", "perplexity", "of the student before", "of text alone"]
    keep = [True, True, before is not None, alone is not None]
    table = _table(_kept(header, keep), [_kept(row, keep) for row in rows], best)
    return f"<h2>Held-out perplexity</h2>\n{table}"


def _losses(history: History) -> str:
    total = {name: history.series[name] for name in ("loss",) if name in history.series}
    own = {}
    task = history.named("loss").get("task")
    if task is not None:
        own["distilled"] = task
    if history.text_only.steps:
        own["text alone"] = history.text_only
    parts = [_figure(total, "Training loss, total", "loss")]
    note = "The student's own loss on the training text, with the teacher and without." if len(own) == 2 else ""
    parts.append(_figure(own, "Cross-entropy on the text", "cross-entropy, nats a token", note))
    return "\n".join(part for part in parts if part)


def _by_alignment(history: History) -> str:
    series = {name: one for name, one in history.named("loss").items() if name != "task"}
    if not series:
        return ""
    rows = [[name, *_first_and_last(one)] for name, one in series.items()]
    table = _table(["alignment", "first", "last", "last / first"], rows)
    return _figure(series, "Loss by alignment", "loss, before weighting") + "\n" + table


def _first_and_last(one: Series) -> list[str]:
    first, last = one.values[0], one.values[-1]
    return [_number(first), _number(last), _ratio(last, first)]


def _rates(history: History) -> dict[str, Series]:
    rates = history.named("learning_rate")
    if len({(tuple(one.steps), tuple(one.values)) for one in rates.values()}) > 1:
        return rates
    general = history.series.get("learning_rate") or next(iter(rates.values()), None)
    return {} if general is None else {"all alignments": general}


def _evaluation(history: History) -> dict[str, Series]:
    return {name: one for name, one in history.series.items() if name.startswith("eval_") and "loss" in name}


def _times(results: Mapping[str, Any]) -> str:
    seconds = results.get("seconds", {})
    rows = [[name, f"{value:.1f}"] for name, value in seconds.items()]
    return f"<h2>Time</h2>\n{_table(['part', 'seconds'], rows)}" if rows else ""


def _figure(series: Mapping[str, Series], title: str, ylabel: str, note: str = "") -> str:
    if not series:
        return ""
    text = f"<p>{escape(note)}</p>\n" if note else ""
    return f"<h2>{escape(title)}</h2>\n{text}{curves(series, ylabel)}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], best: int = -1) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "\n".join(_row(row, number == best) for number, row in enumerate(rows))
    return f"<table>\n<tr>{head}</tr>\n{body}\n</table>"


def _row(cells: Sequence[str], best: bool) -> str:
    opening = '<tr class="best">' if best else "<tr>"
    return opening + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def _kept(cells: Sequence[str], keep: Sequence[bool]) -> list[str]:
    return [cell for cell, wanted in zip(cells, keep, strict=True) if wanted]


def _number(value: float) -> str:
    return f"{value:,.1f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def _ratio(value: float, base: float | None) -> str:
    if base is None or not base or math.isnan(base):
        return ""
    return f"{value / base:.3g} ×"
