import json
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from silverspoon_kd.errors import ConfigurationError
from silverspoon_kd.report import read_history, write_report

SVG = "{http://www.w3.org/2000/svg}"
RESULTS = {
    "perplexity": {"teacher": 16.0, "student before": 4.0e6, "student after": 180.0, "text alone": 240.0},
    "parameters": {"teacher": 134_500_000, "student": 63_700_000},
    "seconds": {"load": 12.34},
    "steps": 4,
    "tokens": {"train": 1000, "held out": 100},
    "peak_memory": 4_300_000_000,
}


def entry(step: int, **changes) -> dict:
    values = {"step": step, "epoch": step / 10, "loss": 8.0 / step, "learning_rate": 1e-3, "grad_norm": 1.0}
    for number in (0, 2, 10):
        values[f"loss/model.layers.{number}"] = (number + 1) / step
        values[f"learning_rate/model.layers.{number}"] = 1e-3
        values[f"grad_norm/model.layers.{number}"] = 0.5
    return {**values, "loss/lm_head": 5.0 / step, "loss/task": 7.0 / step, **changes}


def write_state(folder: Path, log: list[dict]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": log}), "utf-8")


@pytest.fixture
def run(tmp_path):
    write_state(tmp_path, [entry(step) for step in (1, 2, 3, 4)] + [{"step": 4, "train_runtime": 3.0}])
    write_state(tmp_path / "text-only", [{"step": step, "loss": 9.0 / step} for step in (1, 2, 3, 4)])
    (tmp_path / "results.json").write_text(json.dumps(RESULTS), "utf-8")
    return tmp_path


def figures(page: str) -> dict[str, ElementTree.Element]:
    """The figures of a page by the heading above them, each parsed as XML."""
    parts = re.split(r"<h2>(.*?)</h2>", page)
    found = {}
    for title, content in zip(parts[1::2], parts[2::2], strict=True):
        match = re.search(r"<svg.*?</svg>", content, re.DOTALL)
        if match:
            found[title] = ElementTree.fromstring(match.group())
    return found


def words(figure: ElementTree.Element) -> list[str]:
    return [text.strip() for text in ("".join(each.itertext()) for each in figure.iter(f"{SVG}text"))]


def line_lengths(figure: ElementTree.Element) -> list[int]:
    """The number of points of each curve; curves are the only unfilled paths with a stroke width of 1.5."""
    lines = [path for path in figure.iter(f"{SVG}path") if "stroke-width: 1.5" in path.get("style", "")]
    clipped = [path for path in lines if path.get("clip-path")]
    return [len(re.findall(r"[ML]", path.get("d", ""))) for path in clipped]


def test_the_history_has_the_series_by_name(run):
    history = read_history(run)
    assert history.series["loss"].steps == [1, 2, 3, 4]
    assert history.series["loss"].values == [8.0, 4.0, 8 / 3, 2.0]
    assert list(history.named("loss")) == ["lm_head", "model.layers.0", "model.layers.2", "model.layers.10", "task"]
    assert history.named("loss")["model.layers.10"].values == [11.0, 5.5, 11 / 3, 2.75]
    assert history.text_only.values == [9.0, 4.5, 3.0, 2.25]


def test_the_page_loads_nothing(run):
    page = write_report(run).read_text("utf-8")
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#)""", page)
    assert "<script" not in page
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)


def test_the_page_shows_the_perplexities_and_their_ratios(run):
    page = write_report(run).read_text("utf-8")
    rows = [re.findall(r"<t[dh]>(.*?)</t[dh]>", row) for row in re.findall(r"<tr.*?</tr>", page)]
    assert ["student after, distilled", "180", "4.5e-05 ×", "0.75 ×"] in rows
    assert ["teacher", "16", "4e-06 ×", "0.0667 ×"] in rows
    assert ["load", "12.3"] in rows
    for text in ("4 steps", "1,000 tokens train", "teacher 134.5 M parameters", "4.3 GB"):
        assert text in page


def test_huge_perplexities_fit_into_the_table(run):
    perplexity = {**RESULTS["perplexity"], "student before": 2.188e22}
    (run / "results.json").write_text(json.dumps({**RESULTS, "perplexity": perplexity}))
    assert "<td>2.188e+22</td>" in write_report(run).read_text("utf-8")


def test_the_figures_have_every_curve_with_every_point(run):
    found = figures(write_report(run).read_text("utf-8"))
    assert line_lengths(found["Training loss, total"]) == [4]
    assert line_lengths(found["Cross-entropy on the text"]) == [4, 4]
    assert line_lengths(found["Loss by alignment"])[:4] == [4, 4, 4, 4]
    for name in ("lm_head", "model.layers.0", "model.layers.2", "model.layers.10"):
        assert name in words(found["Loss by alignment"])
        assert (name in words(found["Gradient norm by alignment"])) == (name != "lm_head")
    assert "task" not in words(found["Loss by alignment"])


def test_equal_learning_rates_are_one_curve_and_others_are_not(tmp_path):
    write_state(tmp_path, [entry(1), entry(2)])
    assert line_lengths(figures(write_report(tmp_path).read_text("utf-8"))["Learning rate"]) == [2]
    write_state(tmp_path, [entry(1), entry(2, **{"learning_rate/model.layers.2": 1e-4})])
    found = figures(write_report(tmp_path).read_text("utf-8"))["Learning rate"]
    assert "model.layers.2" in words(found)


def test_the_same_run_gives_the_same_page(run):
    assert write_report(run).read_text("utf-8") == write_report(run).read_text("utf-8")
    assert [file.name for file in run.iterdir() if "report" in file.name] == ["report.html"]


def test_a_run_without_the_command_line_is_reported_from_its_latest_checkpoint(tmp_path):
    write_state(tmp_path / "checkpoint-9", [entry(1)])
    write_state(tmp_path / "checkpoint-10", [entry(1), entry(2)])
    page = write_report(tmp_path).read_text("utf-8")
    assert "perplexity" not in page
    assert line_lengths(figures(page)["Training loss, total"]) == [2]


def test_evaluation_losses_are_shown(tmp_path):
    write_state(tmp_path, [entry(1), {"step": 1, "eval_loss": 3.0, "eval_loss/lm_head": 2.0, "eval_runtime": 1.0}])
    assert words(figures(write_report(tmp_path).read_text("utf-8"))["Evaluation"])[-2:] == [
        "eval_loss",
        "eval_loss/lm_head",
    ]


def test_values_that_are_not_finite_leave_a_gap(tmp_path):
    (tmp_path / "trainer_state.json").write_text(
        '{"log_history": [{"step": 1, "loss": 2.0}, {"step": 2, "loss": NaN}, {"step": 3, "loss": Infinity}, '
        '{"step": 4, "loss": 1.0}]}'
    )
    assert [math.isnan(value) for value in read_history(tmp_path).series["loss"].values] == [False, True, True, False]
    assert "Training loss, total" in figures(write_report(tmp_path).read_text("utf-8"))


def test_names_are_text_and_nothing_else(tmp_path):
    write_state(tmp_path, [{"step": 1, "loss": 1.0, "loss/<b>$x_1$</b>": 1.0, "loss/_hidden": 2.0}])
    page = write_report(tmp_path).read_text("utf-8")
    assert "<b>" not in page
    names = words(figures(page)["Loss by alignment"])
    assert "<b>$x_1$</b>" in names
    assert "_hidden" in names


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (None, "has no trainer_state.json, not even in a checkpoint"),
        ('{"log_history": [', "trainer_state.json is damaged"),
        ("[]", "holds no JSON object"),
        ("{}", "has no log_history"),
        ('{"log_history": [{"step": 3}]}', "holds no logged values"),
    ],
)
def test_folders_without_a_log_are_refused(tmp_path, content, wanted):
    if content is not None:
        (tmp_path / "trainer_state.json").write_text(content)
    with pytest.raises(ConfigurationError) as caught:
        write_report(tmp_path)
    assert wanted in str(caught.value)
    assert not (tmp_path / "report.html").exists()


def test_what_is_no_folder_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="is no folder"):
        write_report(tmp_path / "nowhere")
