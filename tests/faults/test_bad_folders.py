"""Output folders and checkpoints that cannot be used are refused before anything is loaded or written."""

import json
import shutil

import pytest
import torch
import transformers

from silverspoon_kd import HolisticDistiller, ResponseBasedDistiller, create_alignments
from silverspoon_kd.errors import CheckpointError, ConfigurationError
from support.tiny import Rows, arguments, collate, qwen3
from support.untouched import condition, refused

LAYERS = r"model\.layers\.\d+"


def holistic(folder, teacher, student, pattern=LAYERS, **changes):
    return HolisticDistiller(
        teacher,
        create_alignments(teacher, student, pattern, output_selector_index=0),
        args=arguments(folder, **{"save_strategy": "steps", "save_steps": 2, **changes}),
        train_dataset=Rows(),
        data_collator=collate,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run with the checkpoints 2 and 4."""
    folder = tmp_path_factory.mktemp("trained")
    holistic(folder, qwen3(0), qwen3(1, hidden=16)).train()
    return folder


@pytest.fixture
def copied(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def refuse(kind, match, distiller, wish):
    before = {path: path.stat().st_mtime_ns for path in [*_files(distiller.args.output_dir)]}
    state = condition(distiller.root)
    with pytest.raises(kind, match=match):
        distiller.train(resume_from_checkpoint=wish)
    assert condition(distiller.root) == state
    assert {path: path.stat().st_mtime_ns for path in [*_files(distiller.args.output_dir)]} == before


def _files(folder):
    from pathlib import Path

    return Path(folder).rglob("*")


def test_output_folder_that_is_a_file(tmp_path):
    file = tmp_path / "taken"
    file.write_text("mine")
    teacher, student = qwen3(0), qwen3(1)
    for folder in (file, file / "inside"):
        with refused(ConfigurationError, rf"{folder}.*{file} is a file.*another output_dir", folder, teacher, student):
            ResponseBasedDistiller(student, teacher, args=arguments(folder), train_dataset=Rows())
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.pt", "projectors.safetensors", "scheduler.pt", "rng_state.pth"]
)
def test_truncated_file(copied, name):
    file = copied / "checkpoint-4" / name
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[: size // 2])
    distiller = holistic(copied, qwen3(0), qwen3(1, hidden=16))
    match = rf"checkpoint-4 is damaged: {name} has {size // 2} bytes, but {size} bytes were written.*earlier checkpoint"
    refuse(CheckpointError, match, distiller, str(copied / "checkpoint-4"))


def test_missing_file(copied):
    (copied / "checkpoint-4" / "trainer_state.json").unlink()
    distiller = holistic(copied, qwen3(0), qwen3(1, hidden=16))
    refuse(CheckpointError, r"trainer_state.json is missing", distiller, str(copied / "checkpoint-4"))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"format": 1}', '{"format": 1, "files": 3}', '{"format": 1, "files": {}}']
)
def test_state_file_that_is_none(copied, text):
    (copied / "checkpoint-4" / "distillation.json").write_text(text)
    distiller = holistic(copied, qwen3(0), qwen3(1, hidden=16))
    refuse(CheckpointError, r"distillation.json cannot be read", distiller, str(copied / "checkpoint-4"))


def test_format_of_a_later_version(copied):
    path = copied / "checkpoint-4" / "distillation.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
    distiller = holistic(copied, qwen3(0), qwen3(1, hidden=16))
    refuse(CheckpointError, r"format 2, but this version reads format 1", distiller, str(copied / "checkpoint-4"))


@pytest.mark.parametrize("name", ["model.safetensors", "projectors.safetensors"])
def test_damage_that_keeps_the_size(copied, name):
    file = copied / "checkpoint-4" / name
    content = bytearray(file.read_bytes())
    content[8:40] = b"?" * 32
    file.write_bytes(content)
    distiller = holistic(copied, qwen3(0), qwen3(1, hidden=16))
    refuse(CheckpointError, rf"{name} is damaged", distiller, str(copied / "checkpoint-4"))


def test_checkpoint_of_another_trainer(tmp_path):
    teacher, student = qwen3(0), qwen3(1)
    args = transformers.TrainingArguments(
        output_dir=tmp_path, max_steps=2, save_steps=2, use_cpu=True, disable_tqdm=True, report_to=[]
    )
    transformers.Trainer(student, args, train_dataset=Rows(), data_collator=collate).train()
    distiller = holistic(tmp_path, teacher, qwen3(1))
    match = r"checkpoint-2 is no complete checkpoint of this library"
    refuse(CheckpointError, match, distiller, str(tmp_path / "checkpoint-2"))
    refuse(CheckpointError, r"no complete checkpoint in .*Start without", distiller, True)


def test_i_03_checkpoint_of_other_alignments(copied):
    distiller = holistic(copied, qwen3(0), qwen3(1, hidden=16), r"model\.layers\.[01]")
    match = r"holistic run with 4 alignments \(model.layers.0.*this is a holistic run with 2.*same alignments"
    refuse(RuntimeError, match, distiller, True)


def test_i_03_checkpoint_of_another_distiller(copied):
    distiller = ResponseBasedDistiller(
        qwen3(1, hidden=16), qwen3(0), args=arguments(copied), train_dataset=Rows(), data_collator=collate
    )
    refuse(CheckpointError, r"is of a holistic run.*this is a response_based run", distiller, True)


def test_student_of_another_shape(copied):
    distiller = holistic(copied, qwen3(0), qwen3(1, hidden=16, intermediate_size=48))
    match = r"not those of this Qwen3ForCausalLM: 'model.layers.0.mlp.*' is \[16, 32\] there and \[16, 48\] here"
    refuse(CheckpointError, match, distiller, str(copied / "checkpoint-4"))


def test_projectors_that_do_not_fit(copied):
    distiller = holistic(copied, qwen3(0), qwen3(1))
    refuse(CheckpointError, r"projectors in .* do not fit this run", distiller, str(copied / "checkpoint-4"))


def test_i_03_checkpoint_without_optimizer(tmp_path):
    holistic(tmp_path, qwen3(0), qwen3(1), save_only_model=True, max_steps=2).train()
    distiller = holistic(tmp_path, qwen3(0), qwen3(1))
    refuse(CheckpointError, r"no optimizer state.*save_only_model=True", distiller, True)


def test_saved_model_is_no_checkpoint(tmp_path):
    distiller = holistic(tmp_path, qwen3(0), qwen3(1))
    distiller.save_model(tmp_path / "final")
    refuse(CheckpointError, r"final has no optimizer state.*save_model", distiller, str(tmp_path / "final"))


def test_folder_that_does_not_exist(tmp_path):
    distiller = holistic(tmp_path, qwen3(0), qwen3(1))
    refuse(CheckpointError, r"no checkpoint folder .*checkpoint-7", distiller, str(tmp_path / "checkpoint-7"))
    refuse(CheckpointError, r"no complete checkpoint in", distiller, True)


def test_resume_passes_over_what_is_incomplete(copied, caplog):
    (copied / "checkpoint-4" / "distillation.json").unlink()
    distiller = holistic(copied, qwen3(0), qwen3(1, hidden=16), max_steps=6)
    with caplog.at_level("WARNING"):
        distiller.train(resume_from_checkpoint=True)
    assert "checkpoint-4 is no complete checkpoint" in caplog.text
    assert [entry["step"] for entry in distiller.state.log_history if "loss" in entry] == [1, 2, 3, 4, 5, 6]
    straight = qwen3(1, hidden=16)
    holistic(copied.parent / "straight", qwen3(0), straight, max_steps=6).train()
    assert all(
        torch.equal(own, other)
        for own, other in zip(straight.parameters(), distiller.student_model.parameters(), strict=True)
    )
