"""Whatever the teacher does ahead of time, the losses and weights are bit for bit the same."""

import random

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import EarlyStoppingCallback, TrainerCallback

from parity.runs import identical
from silverspoon_kd.errors import DataError
from support.distil import make, training_logs
from support.tiny import Rows, collate, qwen3, weights

WAYS = {
    "off": {"overlap_teacher_forward": False},
    "forward only": {"overlap_teacher_forward": True, "teacher_lookahead": 0},
    **{f"ahead {steps}": {"overlap_teacher_forward": True, "teacher_lookahead": steps} for steps in (1, 2, 3)},
}
COMMON = {
    "max_steps": -1,
    "num_train_epochs": 3,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 3,
}


class Masking:
    """A collator that draws random numbers, from each generator that one may use."""

    def __call__(self, rows):
        batch = collate(rows)
        drop = torch.rand(batch["input_ids"].shape) < 0.1 + 0.1 * random.random()
        batch["labels"] = batch["labels"].masked_fill(drop, -100)
        return batch


class Stream(IterableDataset):
    """Rows one after the other."""

    def __iter__(self):
        return iter(Rows(n=27))


class Watch(TrainerCallback):
    """Note in which order teacher runs start and the student's steps end."""

    def __init__(self, distiller):
        self.events, start = [], distiller._executor.start

        def started(batch):
            self.events.append("start")
            return start(batch)

        distiller._executor.start = started

    def on_step_end(self, args, state, control, **kwargs):
        self.events.append("step")


def trained(folder, way, *, given=None, resume=None, callbacks=(), **changes):
    """Train a student with dropout on ragged rows; return the distiller."""
    values = {"train_dataset": Rows(n=27), "data_collator": Masking(), **(given or {})}
    student = qwen3(1, hidden=16, attention_dropout=0.2)
    distiller = make("holistic", folder, student=student, given=values, **{**COMMON, **WAYS[way], **changes})
    for callback in callbacks:
        distiller.add_callback(callback)
    distiller.train(resume_from_checkpoint=resume)
    assert not distiller._ahead._runs
    return distiller


def test_a_batch_stays_the_one_whose_run_was_started(tmp_path, monkeypatch):
    """The ranks of torchrun are on "cpu:0", for which PyTorch would copy it."""
    distiller = make("holistic", tmp_path)
    monkeypatch.setattr(type(distiller.args), "device", torch.device("cpu", 0))
    batch = collate([Rows()[0]])
    assert batch["input_ids"].to(distiller.args.device) is not batch["input_ids"]
    moved = distiller._prepare_inputs(batch)
    assert all(moved[name] is batch[name] for name in batch)


def same(one, other):
    """Check that two runs are equal."""
    assert training_logs(one) == training_logs(other)
    assert identical(weights(one.root), weights(other.root)) == []
    assert one.state.global_step == other.state.global_step


@pytest.fixture(scope="module")
def off(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("off"), "off")


@pytest.mark.parametrize("way", list(WAYS)[1:])
def test_c_07_dropout_accumulation_short_batches_and_epoch_ends(way, off, tmp_path):
    assert off.state.global_step == 15
    same(trained(tmp_path, way), off)


@pytest.mark.parametrize("way", ["ahead 1", "ahead 3"])
def test_evaluation_in_between(way, tmp_path):
    changes = {"given": {"eval_dataset": Rows(n=5, seed=2)}, "eval_strategy": "steps", "eval_steps": 2}
    same(trained(tmp_path, way, **changes), trained(tmp_path, "off", **changes))


@pytest.mark.parametrize("way", ["ahead 1", "ahead 2"])
def test_an_iterable_dataset(way, tmp_path):
    given = {"train_dataset": Stream()}
    one = trained(tmp_path, "off", given=given, max_steps=7)
    same(trained(tmp_path, way, given=given, max_steps=7), one)


@pytest.mark.parametrize("way", ["off", "ahead 1", "ahead 3"])
def test_resume_in_the_middle_of_an_epoch(way, tmp_path):
    plain = {"given": {"data_collator": collate}, "save_strategy": "steps", "save_steps": 7}
    straight = trained(tmp_path, "off", **plain)
    again = trained(tmp_path, way, resume=str(tmp_path / "checkpoint-7"), **plain)
    assert training_logs(again)[-8:] == training_logs(straight)[-8:]
    assert identical(weights(again.root), weights(straight.root)) == []


def test_early_stopping_forgets_what_was_started(tmp_path):
    changes = {
        "given": {"eval_dataset": Rows(n=5, seed=2)},
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,
        "learning_rate": 1.0,
    }
    callbacks = [EarlyStoppingCallback(early_stopping_patience=1)]
    one = trained(tmp_path / "off", "off", callbacks=callbacks, **changes)
    other = trained(tmp_path / "ahead", "ahead 3", callbacks=callbacks, **changes)
    assert 2 < one.state.global_step < 15
    same(one, other)


class Broken(Dataset):
    """One row holds an unknown token."""

    def __init__(self, number):
        self.number, self.rows = number, Rows(n=27)

    def __len__(self):
        return 27

    def __getitem__(self, index):
        row = dict(self.rows[index])
        if index == self.number:
            row["input_ids"] = row["input_ids"] + 1000
        return row


@pytest.mark.parametrize("way", ["off", "ahead 2"])
def test_an_error_is_raised_when_its_batch_is_due(way, tmp_path):
    given = {"train_dataset": Broken(13), "data_collator": collate}
    student = qwen3(1, hidden=16)
    changes = {**COMMON, **WAYS[way], "train_sampling_strategy": "sequential"}
    distiller = make("holistic", tmp_path, student=student, given=given, **changes)
    with pytest.raises(DataError, match="token id"):
        distiller.train()
    assert distiller.state.global_step == 2
    assert not distiller._ahead._runs


@pytest.mark.parametrize(("way", "ahead"), [("off", 0), ("forward only", 0), ("ahead 1", 1), ("ahead 3", 3)])
def test_how_far_the_teacher_is_ahead(way, ahead, tmp_path):
    given = {"train_dataset": Rows(n=30)}
    distiller = make("holistic", tmp_path, given=given, **{**COMMON, **WAYS[way], "max_steps": 4})
    watch = Watch(distiller)
    distiller.add_callback(watch)
    distiller.train()
    assert watch.events.count("start") == 4 * 3  # none too many at the end
    before = watch.events[: watch.events.index("step")].count("start")
    assert before == 3 * (1 + min(ahead, 3))
