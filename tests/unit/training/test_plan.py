"""The plan is told once, before anything runs, and lies in the checkpoint."""

import json
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import transformers

from silverspoon_kd.distributed import resolve_plan
from silverspoon_kd.distributed.plan import DeviceMemory
from silverspoon_kd.training.memory import tell
from support.distil import make
from support.tiny import qwen3

PLAN = resolve_plan(distiller="holistic").with_memory([DeviceMemory("cuda:0", (("weights", 10),), 5)])


@pytest.fixture
def _usual_verbosity() -> Iterator[None]:
    """Whatever another test of this process has set."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_warning()
    yield
    transformers.logging.set_verbosity(before)


@pytest.mark.usefixtures("_usual_verbosity")
def test_the_plan_is_printed_once(tmp_path, capsys):
    distiller = make("holistic", tmp_path, max_steps=1, report_to="none", save_strategy="steps", save_steps=1)
    printed = capsys.readouterr().out
    assert printed.startswith(f"{distiller.plan}\n")  # other libraries print too
    distiller.train()
    distiller.train()
    assert "distiller" not in capsys.readouterr().out
    saved = json.loads((tmp_path / "checkpoint-1" / "distillation.json").read_text())["plan"]
    assert saved == distiller.plan.to_dict()
    (memory,) = saved["memory"]
    teacher, student = qwen3(0), distiller.student_model
    assert memory["place"] == "each rank" and memory["capacity"] is None
    buffers = sum(each.numel() * 4 for each in teacher.buffers())
    assert memory["parts"]["teacher's weights"] == 4 * teacher.num_parameters() + buffers
    projectors = sum(each.numel() for each in distiller.root.projectors.parameters())
    assert memory["parts"]["student's weights"] == 4 * (student.num_parameters() + projectors)
    assert 0 < memory["parts"]["gradients"] <= memory["parts"]["student's weights"]
    # Two layers' outputs of a batch.
    aligned = len(distiller._objective.teacher_taps)
    assert memory["parts"]["signals of 1 batch"] == aligned * 4 * 12 * 32 * 4
    assert memory["parts"]["teacher's forward"] > 0


@pytest.mark.parametrize(("overlap", "batches"), [(True, "signals of 6 batches"), (False, "signals of 1 batch")])
def test_signals_of_all_batches_that_are_started_ahead_are_kept(overlap, batches, tmp_path):
    options = {"overlap_teacher_forward": overlap, "teacher_lookahead": 2, "gradient_accumulation_steps": 2}
    distiller = make("response", tmp_path, report_to="none", **options)
    (memory,) = distiller.plan.memory
    # What the head takes in.
    assert dict(memory.parts)[batches] == (6 if overlap else 1) * 4 * 12 * 32 * 4


@pytest.mark.parametrize(
    ("log_level", "verbosity", "printed"),
    [
        ("passive", "warning", True),
        ("passive", "error", False),
        ("info", "error", True),
        ("warning", "warning", False),
        ("error", "info", False),
    ],
)
def test_a_log_level_silences_the_plan(log_level, verbosity, printed, tmp_path, capsys, caplog):
    before = transformers.logging.get_verbosity()
    getattr(transformers.logging, f"set_verbosity_{verbosity}")()
    try:
        args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, log_level=log_level)
        caplog.clear()
        tell(PLAN, args, 0)
    finally:
        transformers.logging.set_verbosity(before)
    assert capsys.readouterr().out == (f"{PLAN}\n" if printed else "")
    assert caplog.messages == list(PLAN.notes) and len(PLAN.notes) == 1


def test_other_ranks_are_silent(capsys, caplog):
    tell(PLAN, SimpleNamespace(process_index=1, log_level="info"), 0)
    assert capsys.readouterr().out == "" and caplog.messages == []


def test_notes_that_were_told_are_not_told_again(capsys, caplog):
    args = SimpleNamespace(process_index=0, log_level="info", get_process_log_level=lambda: 20)
    tell(PLAN, args, 1)
    assert capsys.readouterr().out and caplog.messages == []
