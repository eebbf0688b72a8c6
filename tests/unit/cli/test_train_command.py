import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from silverspoon_kd.cli.main import app
from silverspoon_kd.losses import available_losses
from support.tiny_folder import model_folder, text_file

LAYERS = {"modules": "even", "loss_function": "normalized_mse", "loss_weight": 0.1}
HEAD = {"modules": "lm_head", "loss_function": "kl_divergence"}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with a teacher and text."""
    folder = tmp_path_factory.mktemp("home")
    model_folder(folder / "teacher")
    text_file(folder / "text.txt")
    return folder


def configuration(home: Path, output: Path, **changes) -> Path:
    values = {
        "distiller": "holistic",
        "teacher": str(home / "teacher"),
        "student": {"layers": 2},
        "data": {"source": str(home / "text.txt"), "block_size": 8, "held_out": 0.2},
        "alignments": [LAYERS, HEAD],
        "baseline": "text-only",
        "training": {
            "output_dir": str(output),
            "max_steps": 3,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-2,
            "alpha": 0.3,
            "save_strategy": "no",
            "use_cpu": True,
        },
    }
    file = output.with_suffix(".yaml")
    file.write_text(yaml.safe_dump({**values, **changes}), "utf-8")
    return file


def command(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def finished(home, tmp_path_factory):
    """One whole run: what it printed, and where it wrote."""
    output = tmp_path_factory.mktemp("run") / "out"
    result = command("train", configuration(home, output))
    assert result.exit_code == 0, result.output
    return result, output


def test_the_table_shows_four_perplexities(finished):
    result, output = finished
    results = json.loads((output / "results.json").read_text())
    assert list(results["perplexity"]) == ["teacher", "student before", "student after", "text alone"]
    for value in results["perplexity"].values():
        assert f"{value:,.1f}" in result.stdout
    assert results["steps"] == 3
    assert "Held-out perplexity after 3 steps" in result.stdout
    assert "loss" in result.stdout


def test_training_helped(finished):
    perplexity = json.loads((finished[1] / "results.json").read_text())["perplexity"]
    assert perplexity["student after"] < perplexity["student before"]
    assert perplexity["text alone"] < perplexity["student before"]


def test_the_student_folder_loads_and_has_the_perplexity_of_the_table(home, finished):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from silverspoon_kd.cli.data import load_documents, split_documents, token_blocks
    from silverspoon_kd.cli.perplexity import perplexity

    student = AutoModelForCausalLM.from_pretrained(finished[1] / "student")
    tokenizer = AutoTokenizer.from_pretrained(finished[1] / "student")
    assert student.config.num_hidden_layers == 2
    _, held_out = split_documents(load_documents(str(home / "text.txt")), 0.2, seed=0)
    blocks = token_blocks(held_out, tokenizer, 8)
    measured = perplexity(student, blocks, batch_size=3, device=torch.device("cpu"))
    results = json.loads((finished[1] / "results.json").read_text())
    assert measured == pytest.approx(results["perplexity"]["student after"], rel=1e-5)


def test_the_log_has_the_loss_of_each_alignment_and_the_baseline_starts_equal(finished):
    log = json.loads((finished[1] / "trainer_state.json").read_text())["log_history"]
    alone = json.loads((finished[1] / "text-only" / "trainer_state.json").read_text())["log_history"]
    for name in ("loss/model.layers.0", "loss/model.layers.1", "loss/lm_head", "loss/task"):
        assert name in log[0]
    # Same student, same first batch: the own loss of the distilled one is the loss of the other.
    assert log[0]["loss/task"] == pytest.approx(alone[0]["loss"], rel=1e-5)
    assert [entry["learning_rate"] for entry in log[:3]] == [entry["learning_rate"] for entry in alone[:3]]


def test_the_total_is_the_weighted_sum(finished):
    first = json.loads((finished[1] / "trainer_state.json").read_text())["log_history"][0]
    features = first["loss/model.layers.0"] + first["loss/model.layers.1"]
    wanted = 0.7 * (0.1 * features + first["loss/lm_head"]) + 0.3 * first["loss/task"]
    assert first["loss"] == pytest.approx(wanted, rel=1e-5)


def test_the_report_is_there_and_can_be_written_again(finished):
    report = finished[1] / "report.html"
    written = report.read_text("utf-8")
    report.unlink()
    result = command("report", finished[1])
    assert result.exit_code == 0
    assert result.stdout.strip() == str(report)
    assert report.read_text("utf-8") == written


def test_the_written_configuration_repeats_the_run(finished, tmp_path):
    result = command("train", finished[1] / "config.yaml", "--output_dir", tmp_path / "again")
    assert result.exit_code == 0, result.output
    first, again = (json.loads((folder / "results.json").read_text()) for folder in (finished[1], tmp_path / "again"))
    assert again["perplexity"] == first["perplexity"]


@pytest.mark.parametrize(
    ("distiller", "changes"),
    [
        ("blockwise", {"alignments": [LAYERS]}),
        ("response_based", {"alignments": [], "soft_loss_fn": "jsd", "soft_loss_fn_kwargs": {"beta": 0.3}}),
    ],
)
def test_the_other_distillers_run_too(home, tmp_path, distiller, changes):
    file = configuration(home, tmp_path / "out", distiller=distiller, baseline=None, **changes)
    result = command("train", file, "--max_steps", "1")
    assert result.exit_code == 0, result.output
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert list(results["perplexity"]) == ["teacher", "student before", "student after"]
    assert results["steps"] == 1


def test_a_student_of_its_own_can_be_given(home, tmp_path):
    model_folder(tmp_path / "student", layers=3, seed=5)
    file = configuration(home, tmp_path / "out", student={"path": str(tmp_path / "student")}, baseline=None)
    result = command("train", file, "--max_steps=1")
    assert result.exit_code == 0, result.output
    log = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    assert "loss/model.layers.2" in log[0]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--max_stps", "3"], "--max_stps is an unknown key. Did you mean 'max_steps'"),
        (["--alpha", "2"], "alpha=2.0 is not between 0"),
        (["--alignments.0.loss_function", "normalised_mse"], "Did you mean 'normalized_mse'"),
        (["--alignments.1.modules", "lm_hed"], "Did you mean 'lm_head'"),
        (["--student.layers", "9"], "student.layers=9 is not between 1 and the teacher's 6 layers"),
        (["--data.source", "nowhere.txt"], "data.source='nowhere.txt' does not exist"),
        (["--teacher", "no/such/folder"], "no/such/folder"),
        (["--lr_scheduler_type", "linnear"], "is 'linnear', which is unknown. Did you mean 'linear'"),
        (["--eval_strategy", "steps", "--load_best_model_at_end"], "training arguments cannot be used"),
    ],
)
def test_bad_values_end_with_code_2_and_one_message(home, tmp_path, options, wanted):
    result = command("train", configuration(home, tmp_path / "out"), *options)
    assert result.exit_code == 2, result.output
    assert wanted in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("silverspoon-kd: ")


def test_an_output_folder_that_is_a_file_is_refused(home, tmp_path):
    (tmp_path / "out").write_text("x")
    result = command("train", configuration(home, tmp_path / "out"))
    assert result.exit_code == 2
    assert "is a file. Name a folder." in result.stderr
    assert (tmp_path / "out").read_text() == "x"


def test_options_before_the_file_are_refused_with_the_right_form(home, tmp_path):
    result = command("train", "--max_steps", "3", configuration(home, tmp_path / "out"))
    assert result.exit_code == 2
    assert "silverspoon-kd train CONFIG.yaml --key value" in result.stderr


def test_other_errors_keep_their_traceback(home, tmp_path, monkeypatch):
    def broken(*args):
        raise ZeroDivisionError("in the middle")

    monkeypatch.setattr("silverspoon_kd.cli.train.run", broken)
    result = command("train", configuration(home, tmp_path / "out"))
    assert isinstance(result.exception, ZeroDivisionError)


def test_losses_lists_the_registry():
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["losses"])
    assert result.exit_code == 0
    for record in available_losses():
        assert record.name in result.stdout


@pytest.mark.slow
def test_the_module_runs_as_a_command():
    command_line = [sys.executable, "-m", "silverspoon_kd", "--help"]
    done = subprocess.run(command_line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    for name in ("train", "report", "losses"):
        assert name in done.stdout


@pytest.mark.multiprocess
def test_two_ranks_measure_the_same_and_print_once(home, finished, tmp_path):
    from support.ranks import torchrun

    file = configuration(home, tmp_path / "out", baseline=None)
    options = ["silverspoon_kd", "train", file, "--per_device_train_batch_size", "2"]
    torchrun(Path("-m"), options, log=tmp_path / "log")
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    alone = json.loads((finished[1] / "results.json").read_text())
    for name in ("teacher", "student before"):
        assert results["perplexity"][name] == pytest.approx(alone["perplexity"][name], rel=1e-6)
    # Two rows on each of two ranks are the same steps as four rows on one.
    after = [each["perplexity"]["student after"] for each in (results, alone)]
    assert after[0] == pytest.approx(after[1], rel=1e-3)
    printed = (tmp_path / "log").read_text()
    assert printed.count("Held-out perplexity after 3 steps") == 1
    assert printed.count("Loading the teacher") == 1
