"""What lies in a checkpoint, who can read it, and which checkpoints are kept."""

import json
import os
import shutil
import subprocess
import sys
from functools import partial

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from silverspoon_kd import load_student_weights_from_checkpoint, load_student_with_projectors_from_checkpoint
from silverspoon_kd.training.checkpoint import last_complete, read_state, rotate
from support.distil import make
from support.tiny import Rows, llama, qwen3, weights

STEPS = {"save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch"}
FILES = {
    "config.json",
    "distillation.json",
    "generation_config.json",
    "model.safetensors",
    "optimizer.pt",
    "projectors.safetensors",
    "rng_state.pth",
    "scheduler.pt",
    "trainer_state.json",
    "training_args.bin",
}


def folders(path):
    return sorted(child.name for child in path.iterdir())


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_i_13_layout(tmp_path):
    distiller = make("blockwise", tmp_path, max_steps=6, save_total_limit=2, label_smoothing_factor=0.1, **STEPS)
    distiller.train()
    assert folders(tmp_path) == ["checkpoint-4", "checkpoint-6"]
    for name in folders(tmp_path):
        assert {path.name for path in (tmp_path / name).iterdir()} == FILES
        state = read_state(tmp_path / name)
        assert set(state["files"]) == FILES - {"distillation.json"}
        assert state["files"]["model.safetensors"] == os.path.getsize(tmp_path / name / "model.safetensors")
    last = tmp_path / "checkpoint-6"
    assert load_file(last / "model.safetensors").keys() == distiller.student_model.state_dict().keys()
    assert same(load_file(last / "projectors.safetensors"), dict(distiller.root.projectors.state_dict()))
    rows = read_state(last)["alignments"]
    assert rows[1] == {
        "name": "model.layers.1",
        "teacher_module": "model.layers.1",
        "student_module": "model.layers.1",
        "loss": "mse",
        "input_projector": {"kind": "linear", "in": 32, "out": 16, "bias": True},
        "output_projector": {"kind": "linear", "in": 16, "out": 32, "bias": True},
    }
    assert json.loads((last / "trainer_state.json").read_text())["global_step"] == 6


def test_i_13_arguments_load_in_a_process_without_gpus(tmp_path):
    make("response", tmp_path, max_steps=2, save_total_limit=3, label_smoothing_factor=0.1, **STEPS).train()
    code = (
        "import sys, torch; args = torch.load(sys.argv[1], weights_only=False); "
        "print(type(args).__module__, args.save_total_limit, args.label_smoothing_factor, args.max_steps)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "checkpoint-2" / "training_args.bin"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["silverspoon_kd.training.arguments", "3", "0.1", "2"], done.stderr


def test_response_checkpoint_has_no_projectors(tmp_path):
    distiller = make("response", tmp_path, max_steps=2, **STEPS)
    distiller.train()
    assert {path.name for path in (tmp_path / "checkpoint-2").iterdir()} == FILES - {"projectors.safetensors"}
    # The folder held a run with projectors before.
    shutil.copy(tmp_path / "checkpoint-2" / "config.json", tmp_path / "checkpoint-2" / "projectors.safetensors")
    distiller.save_model(tmp_path / "checkpoint-2")
    assert not (tmp_path / "checkpoint-2" / "projectors.safetensors").exists()


def loaded_without_complaint(cls, folder):
    model, report = cls.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model


@pytest.mark.parametrize("kind", ["tied", "untied", "bfloat16", "sharded"])
def test_from_pretrained_reads_the_student(tmp_path, kind):
    """Both a checkpoint and the folder of save_model."""
    student = llama(1, hidden=16, tie_word_embeddings=kind == "tied")
    if kind == "bfloat16":
        student.to(torch.bfloat16)
    if kind == "sharded":
        student.save_pretrained = partial(student.save_pretrained, max_shard_size="8KB")
    distiller = make("holistic", tmp_path, student=student, teacher=llama(0), max_steps=2, **STEPS)
    distiller.train()
    distiller.save_model(tmp_path / "final")
    for folder in (tmp_path / "checkpoint-2", tmp_path / "final"):
        assert (len(list(folder.glob("model-*.safetensors"))) > 2) == (kind == "sharded")
        model = loaded_without_complaint(transformers.AutoModelForCausalLM, folder)
        assert model.dtype == student.dtype
        assert same(weights(model), weights(student))
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == (kind == "tied")
        assert read_state(folder)["files"].keys() >= {path.name for path in folder.glob("*.safetensors")}


@pytest.mark.parametrize("kind", ["tied", "sharded"])
def test_resume_reads_the_student(tmp_path, kind):
    def distiller(seed):
        student = llama(seed, hidden=16, tie_word_embeddings=kind == "tied")
        if kind == "sharded":
            student.save_pretrained = partial(student.save_pretrained, max_shard_size="8KB")
        return make("holistic", tmp_path, student=student, teacher=llama(0), max_steps=4, **STEPS)

    straight = distiller(1)
    straight.train()
    shutil.rmtree(tmp_path / "checkpoint-4")
    resumed = distiller(5)
    resumed.train(resume_from_checkpoint=True)
    assert same(weights(straight.root), weights(resumed.root))
    head = resumed.student_model.lm_head.weight
    assert (head is resumed.student_model.model.embed_tokens.weight) == (kind == "tied")


def test_peft_reads_the_adapters(tmp_path):
    student = get_peft_model(qwen3(1, hidden=16), LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
    distiller = make("holistic", tmp_path, student=student, max_steps=2, **STEPS)
    distiller.train()
    distiller.save_model(tmp_path / "final")
    for folder in (tmp_path / "checkpoint-2", tmp_path / "final"):
        assert not (folder / "model.safetensors").exists()
        model = PeftModel.from_pretrained(qwen3(1, hidden=16), folder)
        assert same(weights(model), weights(student))
        assert (folder / "projectors.safetensors").is_file()
        assert "adapter_model.safetensors" in read_state(folder)["files"]
    assert any(value.abs().sum() > 0 for name, value in weights(student).items() if "lora_B" in name)


def test_plain_module(tmp_path):
    def net(seed, width):
        torch.manual_seed(seed)
        return torch.nn.Sequential(
            torch.nn.Linear(4, width), torch.nn.BatchNorm1d(width), torch.nn.ReLU(), torch.nn.Linear(width, 3)
        )

    rows = [(torch.randn(4), torch.tensor(1)) for _ in range(16)]
    distiller = make(
        "holistic",
        tmp_path,
        teacher=net(0, 8),
        student=net(1, 6),
        modules=["1"],
        given={"train_dataset": rows, "data_collator": None},
        max_steps=2,
        **STEPS,
    )
    distiller.train()
    saved = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert same(saved, dict(distiller.student_model.state_dict()))
    copy = load_student_weights_from_checkpoint(net(5, 6), tmp_path / "checkpoint-2")
    assert same(dict(copy.state_dict()), saved)


def test_model_tools_read_student_and_projectors(tmp_path):
    distiller = make("blockwise", tmp_path, max_steps=2, **STEPS)
    distiller.train()
    distiller.save_model(tmp_path / "final")
    for folder in (tmp_path / "checkpoint-2", tmp_path / "final"):
        student, projectors = load_student_with_projectors_from_checkpoint(qwen3(9, hidden=16), folder)
        assert same(weights(student), weights(distiller.student_model))
        assert list(projectors) == [f"model.layers.{index}" for index in range(4)]
        for own, sides in zip(distiller.root.projectors, projectors.values(), strict=True):
            assert same(weights(own.input), weights(sides["input"]))
            assert same(weights(own.output), weights(sides["output"]))


def test_saving_beside_checkpoints_names_only_its_own_files(tmp_path):
    """The common save_model() into the output folder stays readable when checkpoints and logs in it change."""
    distiller = make("holistic", tmp_path, max_steps=4, **STEPS)
    distiller.train()
    (tmp_path / "train.log").write_text("a")
    distiller.save_model()
    assert set(read_state(tmp_path)["files"]) == {"model.safetensors", "projectors.safetensors"}
    (tmp_path / "train.log").write_text("more")
    shutil.rmtree(tmp_path / "checkpoint-2")
    read_state(tmp_path)
    assert last_complete(tmp_path)[0] == tmp_path / "checkpoint-4"


def worse_after_two_steps(folder, **changes):
    """A run whose fourth step is worse than its second."""
    values = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    given = {"train_dataset": Rows(), "eval_dataset": Rows(n=8, seed=5)}
    distiller = make(
        "holistic", folder, given=given, load_best_model_at_end=True, learning_rate=0.5, **{**values, **changes}
    )

    class Spoil(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                distiller.lr_scheduler.base_lrs = [500.0] * len(distiller.lr_scheduler.base_lrs)
                for group in distiller.optimizer.param_groups:
                    group["lr"] = 500.0

    distiller.add_callback(Spoil())
    return distiller


@pytest.mark.parametrize("limit", [None, 1])
def test_i_09_load_best_model_at_end(tmp_path, limit):
    distiller = worse_after_two_steps(tmp_path, save_total_limit=limit)
    teacher = weights(distiller.teacher)
    distiller.train()
    losses = [entry["eval_loss"] for entry in distiller.state.log_history if "eval_loss" in entry]
    assert losses[0] < losses[1] / 10
    best = tmp_path / "checkpoint-2"
    assert distiller.state.best_model_checkpoint == str(best)
    assert same(load_file(best / "model.safetensors"), dict(distiller.student_model.state_dict()))
    assert same(load_file(best / "projectors.safetensors"), dict(distiller.root.projectors.state_dict()))
    assert same(weights(distiller.teacher), teacher)
    metrics = distiller.evaluate()
    assert metrics["eval_loss"] == pytest.approx(losses[0], rel=1e-6)
    parts = [value for key, value in metrics.items() if key.startswith("eval_loss/")]
    assert len(parts) == 4 and sum(parts) == pytest.approx(losses[0], rel=1e-5)
    read_state(best)


def test_i_07_best_model_without_labels(tmp_path):
    rows = {"train_dataset": Rows(labels=False), "eval_dataset": Rows(n=8, labels=False)}
    distiller = make(
        "response",
        tmp_path,
        given=rows,
        load_best_model_at_end=True,
        eval_strategy="steps",
        eval_steps=2,
        metric_for_best_model="eval_loss",
        learning_rate=1.0,
        **{**STEPS, "optim": "sgd"},
    )
    assert distiller.args.greater_is_better is False
    distiller.train()
    losses = [entry["eval_loss"] for entry in distiller.state.log_history if "eval_loss" in entry]
    assert len(losses) == 2 and 0 < losses[1] < losses[0]
    assert distiller.state.best_metric == losses[1]


def complete(run, step, age):
    folder = run / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "distillation.json").write_text("{}")
    os.utime(folder / "distillation.json", (1e9 - age, 1e9 - age))
    return folder


def unfinished(run, step):
    (run / f"checkpoint-{step}").mkdir(parents=True)


@pytest.mark.parametrize(
    ("limit", "best", "left"),
    [
        (None, None, [2, 4, 6, 8, 10]),
        (0, None, [2, 4, 6, 8, 10]),
        (1, None, [6]),
        (2, None, [4, 6]),
        (3, None, [2, 4, 6]),
        (4, None, [2, 4, 6, 8]),
        (1, 2, [2, 6]),
        (2, 2, [2, 6]),
        (3, 2, [2, 4, 6]),
        (1, 6, [6]),
    ],
)
def test_rotation_keeps_complete_checkpoints(tmp_path, limit, best, left):
    """10 was not finished, and 8 is left from an older run in the same folder that went further."""
    for step, age in ((2, 30), (4, 20), (8, 90)):
        complete(tmp_path, step, age)
    unfinished(tmp_path, 10)
    (tmp_path / "checkpoint-final").mkdir()
    newest = complete(tmp_path, 6, 10)
    rotate(tmp_path, limit, newest, best and str(tmp_path / f"checkpoint-{best}"))
    assert folders(tmp_path) == sorted([f"checkpoint-{step}" for step in left] + ["checkpoint-final"])


def test_rotation_never_deletes_the_only_complete_checkpoint(tmp_path):
    """A folder that an older, killed run left looks newer, because its clock or a copy says so."""
    unfinished(tmp_path, 8)
    os.utime(tmp_path / "checkpoint-8", (4e9, 4e9))
    make("holistic", tmp_path, max_steps=4, save_total_limit=1, **STEPS).train()
    assert folders(tmp_path) == ["checkpoint-4"]
    assert last_complete(tmp_path)[0] == tmp_path / "checkpoint-4"


def test_last_complete_goes_by_the_number(tmp_path):
    make("holistic", tmp_path, max_steps=10, **{**STEPS, "save_steps": 5}).train()
    assert folders(tmp_path) == ["checkpoint-10", "checkpoint-5"]
    assert last_complete(tmp_path) == (tmp_path / "checkpoint-10", [])
