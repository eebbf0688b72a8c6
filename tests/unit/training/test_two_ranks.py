"""Whole runs on two ranks: the numbers of one process, an exact resume, one checkpoint."""

import json
from pathlib import Path

import pytest

from support import two_ranks
from support.distil import KINDS
from support.ranks import torchrun

pytestmark = pytest.mark.multiprocess

PROGRAM = Path(two_ranks.__file__)


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What each of two ranks found, from one start."""
    folder = tmp_path_factory.mktemp("ranks")
    torchrun(PROGRAM, [folder], log=folder / "log", timeout=115, fork=True)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def test_both_ranks_report_the_same(reports):
    for name in ("equal", "ragged", "rates", "evaluated", "resumed"):
        assert reports[0][name] == reports[1][name], name


@pytest.mark.parametrize("flag", ["averaged", "not averaged"])
@pytest.mark.parametrize("kind", KINDS)
def test_h_11_loss_of_rows_of_equal_length(reports, tmp_path, kind, flag):
    alone = two_ranks.first_step(kind, tmp_path, 4, flag == "averaged", **two_ranks.EQUAL)
    assert reports[0]["equal"][f"{kind} {flag}"] == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_h_11_loss_of_ragged_rows(reports, tmp_path, kind):
    alone = two_ranks.first_step(kind, tmp_path, 4, True, n=8)
    assert reports[0]["ragged"][kind] == pytest.approx(alone, rel=1e-5)


def test_i_01_schedules_step_once_per_optimizer_step(reports):
    rates = reports[0]["rates"]
    share = [1.0, 0.75, 0.5, 0.25, 0.0]
    assert [each["model.layers.1"] for each in rates] == pytest.approx([1e-3 * part for part in share])
    assert [each["model.layers.0"] for each in rates] == pytest.approx([1e-4 * part for part in share])


@pytest.mark.parametrize("kind", KINDS)
def test_i_03_resume_is_exact(reports, kind):
    for report in reports:
        result = report["resumed"][kind]
        assert result["same"] and result["logs"] and result["steps"] == 6
    assert reports[0]["resumed"][kind]["digest"] == reports[1]["resumed"][kind]["digest"]


@pytest.mark.parametrize("kind", KINDS)
def test_i_13_one_checkpoint_of_both_ranks(reports, kind):
    files = set(reports[0]["resumed"][kind]["files"])
    assert files - {"projectors.safetensors"} == {
        "config.json",
        "distillation.json",
        "generation_config.json",
        "model.safetensors",
        "optimizer.pt",
        "rng_state_0.pth",
        "rng_state_1.pth",
        "scheduler.pt",
        "trainer_state.json",
        "training_args.bin",
    }
    assert ("projectors.safetensors" in files) == (kind != "response")


def test_training_does_not_notice_an_evaluation_before_it(reports):
    one, other = (report["evaluated first"] for report in reports)
    assert one["wrapped"] == "DistributedDataParallel" and one["same"]
    assert one == other


@pytest.mark.parametrize(("kind", "n"), two_ranks.EVALUATED)
def test_metrics_do_not_depend_on_the_number_of_ranks(reports, tmp_path, kind, n):
    """Also where the last batches are filled up with rows that were counted before."""
    alone = two_ranks.evaluated(kind, tmp_path, 2, n)
    found = reports[0]["evaluated"][f"{kind} {n}"]
    for name in ("metrics", "with predictions", "with metrics"):
        assert found[name] == pytest.approx(alone["metrics"], rel=1e-5), name
    assert found["own"] == [n, sum(map(sum, alone["labels"]))]
    assert found["labels"] == alone["labels"]
    for own, other in zip(found["predictions"], alone["predictions"], strict=True):
        for left, right in zip(own, other, strict=True):
            assert left == pytest.approx(right, abs=1e-5)


def test_terms_add_up_to_the_loss_for_every_number_of_rows(reports):
    for name, report in reports[0]["evaluated"].items():
        metrics = report["metrics"]
        terms = sum(value for key, value in metrics.items() if key.startswith("loss/"))
        total = 0.75 * terms + 0.25 * metrics["task_loss"]
        assert metrics["loss"] == pytest.approx(total, rel=1e-5), name


def test_both_ranks_refuse_together(reports):
    for report in reports:
        assert "no complete checkpoint" in report["refused"]
