"""Three steps, a checkpoint, and three more steps by another distiller are the same as six."""

import pickle
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from support.distil import make, training_logs
from support.tiny import Rows, qwen3

# 16 rows in batches of 4: step 3 is inside the first epoch, step 5 in the second.
RUN = {
    "max_steps": 6,
    "optim": "adamw_torch",
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "lr_scheduler_type": "linear",
    "save_strategy": "steps",
    "save_steps": 3,
}
RATES = {"model.layers.0": {"learning_rate": 1e-3}, "model.layers.2": {"learning_rate": 3e-3, "weight_decay": 0.0}}


def warm(optimizer, num_warmup_steps, num_training_steps):
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / num_training_steps))


OWN = {
    "model.layers.0": {
        "optimizer": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
        "learning_rate": 0.05,
    },
    "model.layers.1": {"optimizer": "adagrad"},
    "model.layers.2": {"scheduler": "cosine"},
    "model.layers.3": {"scheduler": warm, "max_grad_norm": 0.1},
}


def run(kind, folder, seed, **changes):
    student = qwen3(seed, hidden=16, attention_dropout=0.2)
    return make(kind, folder, student=student, given={"train_dataset": Rows(n=16)}, **{**RUN, **changes})


def assert_same(one, other, where=""):
    """Compare nested values exactly; times may differ."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same(left, right, f"{where}/{index}")
    else:
        assert one == other, where


def assert_same_run(one, other):
    assert_same(one.root.state_dict(), other.root.state_dict(), "weights")
    assert_same(one.optimizer.state_dict(), other.optimizer.state_dict(), "optimizer")
    assert_same(one.lr_scheduler.state_dict(), other.lr_scheduler.state_dict(), "schedule")
    assert_same(training_logs(one), training_logs(other), "log")


def resume_at_3(kind, folder, seed=7, **changes):
    """Continue a finished run from its checkpoint 3, with models that start from other weights."""
    shutil.rmtree(folder / "checkpoint-6")
    distiller = run(kind, folder, seed, **changes)
    # Whatever was drawn in this process before must not matter.
    torch.rand(5)
    distiller.train(resume_from_checkpoint=True)
    return distiller


CASES = {
    "holistic": ("holistic", {"alignment": RATES}),
    "blockwise": ("blockwise", {"alignment": RATES}),
    "response": ("response", {}),
    "own optimizers, accumulation, task loss": (
        "holistic",
        {"alignment": OWN, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "alpha": 0.5},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_i_03_six_steps_equal_three_and_three(tmp_path, case):
    kind, changes = CASES[case]
    straight = run(kind, tmp_path, 1, **changes)
    before = {name: value.clone() for name, value in straight.root.state_dict().items()}
    straight.train()
    resumed = resume_at_3(kind, tmp_path, **changes)
    assert resumed.state.global_step == 6
    assert_same_run(straight, resumed)
    steps = {float(state["step"]) for state in resumed.optimizer.state.values() if "exp_avg" in state}
    assert steps == {6.0}
    learnt = [name for name, value in before.items() if not torch.equal(value, straight.root.state_dict()[name])]
    assert any(name.startswith("student.model.layers.3") for name in learnt)
    assert any(name.startswith("projectors.") for name in learnt) == (kind != "response")
    assert any(".input." in name for name in learnt) == (kind == "blockwise")


def test_i_03_dropout_and_order_matter_in_this_test(tmp_path):
    """The comparison above would see wrong random numbers and a wrong order of the rows."""
    losses = []
    for changes in ({}, {"data_seed": 2}, {"student": qwen3(1, hidden=16, attention_dropout=0.0)}):
        student = qwen3(1, hidden=16, attention_dropout=0.2)
        distiller = make(
            "holistic", tmp_path, **{"student": student, **RUN, "max_steps": 1, "save_strategy": "no", **changes}
        )
        losses.append(distiller.train().training_loss)
    assert len(set(losses)) == 3


def test_i_03_no_row_is_repeated_or_left_out(tmp_path):
    class Noted(Rows):
        def __init__(self):
            super().__init__(n=16)
            self.seen = []

        def __getitem__(self, index):
            self.seen.append(index)
            return super().__getitem__(index)

    def distiller(rows):
        return make("response", tmp_path, given={"train_dataset": rows}, **{**RUN, "max_steps": 8})

    first, second = Noted(), Noted()
    straight = distiller(first)
    first.seen.clear()
    straight.train()
    shutil.rmtree(tmp_path / "checkpoint-6")
    shutil.rmtree(tmp_path / "checkpoint-8")
    resumed = distiller(second)
    second.seen.clear()
    resumed.train(resume_from_checkpoint=True)
    assert len(first.seen) == 32
    assert sorted(first.seen[:16]) == sorted(first.seen[16:]) == list(range(16))
    assert second.seen[-20:] == first.seen[-20:]


class Net(nn.Module):
    def __init__(self, seed, width):
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.3))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


def test_i_03_plain_module_with_buffers(tmp_path):
    torch.manual_seed(3)
    rows = [{"x": torch.randn(4)} for _ in range(16)]

    def distiller(seed):
        return make(
            "holistic",
            tmp_path,
            teacher=Net(0, 8),
            student=Net(seed, 6),
            modules=["body"],
            given={"train_dataset": rows},
            **RUN,
        )

    straight = distiller(1)
    straight.train()
    shutil.rmtree(tmp_path / "checkpoint-6")
    resumed = distiller(7)
    resumed.train(resume_from_checkpoint=True)
    assert_same_run(straight, resumed)
    assert straight.student_model.body[1].num_batches_tracked == 6


def test_i_03_lora_student(tmp_path):
    def distiller(seed):
        base = qwen3(1, hidden=16, attention_dropout=0.2)
        torch.manual_seed(seed)
        student = get_peft_model(base, LoraConfig(target_modules=["q_proj", "v_proj"], r=2, lora_dropout=0.1))
        return make("holistic", tmp_path, student=student, given={"train_dataset": Rows(n=16)}, alignment=RATES, **RUN)

    straight = distiller(1)
    straight.train()
    shutil.rmtree(tmp_path / "checkpoint-6")
    resumed = distiller(7)
    resumed.train(resume_from_checkpoint=True)
    assert_same_run(straight, resumed)


def test_nothing_is_unpickled(tmp_path, monkeypatch):
    """A checkpoint may come from a stranger: every load of it refuses code."""
    straight = run("blockwise", tmp_path, 1, alignment=OWN)
    straight.train()
    load, loads = torch.load, []

    def refusing(file, *args, weights_only=None, **kwargs):
        assert weights_only is True, file
        loads.append(file)
        return load(file, *args, weights_only=True, **kwargs)

    def never(*args, **kwargs):
        raise AssertionError("something was unpickled")

    monkeypatch.setattr(torch, "load", refusing)
    monkeypatch.setattr(pickle, "load", never)
    monkeypatch.setattr(pickle, "loads", never)
    resumed = resume_at_3("blockwise", tmp_path, alignment=OWN)
    assert_same_run(straight, resumed)
    assert {str(file).rsplit("/", 1)[-1] for file in loads} == {"optimizer.pt", "scheduler.pt", "rng_state.pth"}


def test_i_03_a_finished_run_has_nothing_left_to_do(tmp_path):
    straight = run("holistic", tmp_path, 1, lr_scheduler_type="constant")
    straight.train()
    resumed = run("holistic", tmp_path, 7, lr_scheduler_type="constant")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6
    assert_same_run(straight, resumed)
