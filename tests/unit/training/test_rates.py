"""Learning rates, schedules, clipping and optimizers per alignment, as a whole run uses and logs them."""

import json
import math
from pathlib import Path

import pytest
import torch
import transformers

from silverspoon_kd.errors import ConfigurationError
from support.distil import KINDS, make, training_logs
from support.tiny import Rows, qwen3, weights

LAYERS = [f"model.layers.{index}" for index in range(4)]
RATES = {"model.layers.0": {"learning_rate": 1e-4}, "model.layers.1": {"learning_rate": 0.0}}


class Used(transformers.TrainerCallback):
    """The rates with which each optimizer step is made."""

    def __init__(self):
        self.rates = []

    def on_pre_optimizer_step(self, args, state, control, optimizer, **kwargs):
        self.rates.append({group["alignment"]: group["lr"] for group in optimizer.param_groups})


@pytest.mark.parametrize("accumulation", [1, 2])
def test_i_01_rates_of_each_step(tmp_path, accumulation):
    used = Used()
    distiller = make(
        "holistic",
        tmp_path,
        alignment=RATES,
        given={"callbacks": [used]},
        learning_rate=1e-3,
        lr_scheduler_type="linear",
        gradient_accumulation_steps=accumulation,
        per_device_train_batch_size=2,
        max_steps=4,
    )
    distiller.train()
    share = [1.0, 0.75, 0.5, 0.25]
    assert [rates["model.layers.2"] for rates in used.rates] == pytest.approx([1e-3 * each for each in share])
    assert [rates["model.layers.0"] for rates in used.rates] == pytest.approx([1e-4 * each for each in share])
    assert [rates["model.layers.1"] for rates in used.rates] == [0.0] * 4
    assert [rates["student"] for rates in used.rates] == pytest.approx([1e-3 * each for each in share])
    assert {group["lr"] for group in distiller.optimizer.param_groups} == {0.0}
    logged = training_logs(distiller)
    assert [entry["learning_rate"] for entry in logged] == [rates["student"] for rates in used.rates]
    assert [entry["learning_rate/model.layers.0"] for entry in logged] == [
        rates["model.layers.0"] for rates in used.rates
    ]
    assert [entry["learning_rate/model.layers.2"] for entry in logged] == [
        rates["model.layers.2"] for rates in used.rates
    ]


def test_i_01_an_alignment_with_its_own_schedule(tmp_path):
    used = Used()
    make(
        "blockwise",
        tmp_path,
        alignment={"model.layers.0": {"scheduler": "constant"}, "model.layers.1": {"scheduler": "cosine"}},
        given={"callbacks": [used]},
        learning_rate=1.0,
        lr_scheduler_type="linear",
        warmup_steps=1,
        max_steps=5,
    ).train()
    assert [rates["model.layers.0"] for rates in used.rates] == [1.0] * 5
    cosine = [0.0] + [0.5 * (1 + math.cos(math.pi * step / 4)) for step in range(4)]
    assert [rates["model.layers.1"] for rates in used.rates] == pytest.approx(cosine)
    assert [rates["model.layers.2"] for rates in used.rates] == pytest.approx([0.0, 1.0, 0.75, 0.5, 0.25])


@pytest.mark.parametrize("kind", KINDS)
def test_i_02_keys_and_types_of_the_log(tmp_path, kind):
    distiller = make(kind, tmp_path, alignment=RATES, alpha=0.25, max_grad_norm=1.0)
    distiller.train()
    names = ["logits"] if kind == "response" else LAYERS
    keys = {"loss", "grad_norm", "learning_rate", "epoch", "step", "loss/task"} | {f"loss/{name}" for name in names}
    if kind != "response":
        groups = [*LAYERS, "student"]
        keys |= {f"{word}/{name}" for word in ("learning_rate", "grad_norm") for name in groups}
    entries = training_logs(distiller)
    assert len(entries) == 4
    for entry in entries:
        assert set(entry) == keys
        assert all(type(value) is float for key, value in entry.items() if key != "step"), entry
        assert all(math.isfinite(value) for value in entry.values())
        total = 0.75 * sum(entry[f"loss/{name}"] for name in names) + 0.25 * entry["loss/task"]
        assert entry["loss"] == pytest.approx(total, rel=1e-5)
        if kind != "response":
            norms = [entry[f"grad_norm/{name}"] for name in groups]
            assert entry["grad_norm"] == pytest.approx(math.hypot(*norms), rel=1e-5)


def test_i_02_means_between_log_entries(tmp_path):
    """Logged every three steps, with accumulation: the mean of what single steps log."""
    changes = {"max_steps": 6, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "alpha": 0.5}
    each = make("holistic", tmp_path / "a", **changes)
    each.train()
    third = make("holistic", tmp_path / "b", **changes, logging_steps=3)
    third.train()
    single, means = training_logs(each), training_logs(third)
    assert len(single) == 6 and len(means) == 2
    for index, entry in enumerate(means):
        part = single[3 * index : 3 * index + 3]
        for key in ("loss", "loss/task", *(f"loss/{name}" for name in LAYERS)):
            assert entry[key] == pytest.approx(sum(row[key] for row in part) / 3, rel=1e-5), key


def test_i_02_tensorboard_gets_the_same_numbers(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    distiller = make("blockwise", tmp_path, alignment=RATES, report_to="tensorboard")
    distiller.train()
    events = EventAccumulator(str(next((tmp_path / "board").rglob("events*")).parent))
    events.Reload()
    for key in (
        "loss/model.layers.3",
        "learning_rate/model.layers.0",
        "grad_norm/model.layers.2",
        "loss",
        "learning_rate",
    ):
        shown = [event.value for event in events.Scalars(f"train/{key}")]
        assert shown == pytest.approx([entry[key] for entry in training_logs(distiller)], rel=1e-6), key


def test_report_to_is_off_by_default(tmp_path):
    distiller = make("response", tmp_path)
    modules = {type(callback).__module__ for callback in distiller.callback_handler.callbacks}
    assert not any("integrations" in module for module in modules), modules
    distiller.train()
    assert list(tmp_path.iterdir()) == []


def moved(before, after):
    """Distance by layer."""
    return {
        name: math.sqrt(sum(float(((after[key] - before[key]) ** 2).sum()) for key in after if key.startswith(name)))
        for name in LAYERS
    }


def one_step(folder, weight, limit, **alignment):
    """One step of SGD with rate 1; the losses are large enough for the 1e-6 in the formula of clipping."""
    student = qwen3(1)
    before = weights(student)
    fields = {name: {"loss_weight": 100.0, **alignment.get(name, {})} for name in LAYERS}
    fields["model.layers.0"]["loss_weight"] = 100.0 * weight
    distiller = make(
        "blockwise",
        folder,
        student=student,
        alignment=fields,
        learning_rate=1.0,
        max_steps=1,
        max_grad_norm=limit,
    )
    distiller.train()
    return moved(before, weights(student)), training_logs(distiller)[0]


def test_i_04_a_large_block_does_not_starve_the_others(tmp_path):
    free, free_log = one_step(tmp_path / "a", 1.0, 0.0)
    limit = 0.5 * free_log["grad_norm/model.layers.1"]
    clipped, log = one_step(tmp_path / "b", 1.0, limit)
    scaled, scaled_log = one_step(tmp_path / "c", 1000.0, limit)
    assert scaled_log["grad_norm/model.layers.0"] == pytest.approx(1000 * log["grad_norm/model.layers.0"], rel=1e-4)
    assert scaled["model.layers.0"] == pytest.approx(limit, rel=1e-4)
    for name in LAYERS[1:]:
        assert scaled_log[f"grad_norm/{name}"] == log[f"grad_norm/{name}"]
        assert scaled[name] == clipped[name] == pytest.approx(min(limit, free[name]), rel=1e-4)
    assert free["model.layers.1"] == pytest.approx(free_log["grad_norm/model.layers.1"], rel=1e-4)


@pytest.mark.parametrize("off", [0, None])
def test_i_04_zero_and_none_disable_and_still_measure(tmp_path, off):
    distance, log = one_step(tmp_path, 1000.0, off)
    assert type(log["grad_norm"]) is float and math.isfinite(log["grad_norm"])
    for name in LAYERS:
        assert distance[name] == pytest.approx(log[f"grad_norm/{name}"], rel=1e-4)


def test_i_04_an_alignment_has_its_own_limit(tmp_path):
    distance, log = one_step(
        tmp_path, 1.0, 0.0, **{"model.layers.2": {"max_grad_norm": 1e-3}, "model.layers.3": {"max_grad_norm": 0}}
    )
    assert distance["model.layers.2"] == pytest.approx(1e-3, rel=1e-3)
    assert distance["model.layers.3"] == pytest.approx(log["grad_norm/model.layers.3"], rel=1e-4)
    assert log["grad_norm/model.layers.2"] > 2e-3


@pytest.mark.parametrize("kind", KINDS)
def test_i_06_optimizers_none(tmp_path, kind):
    default, none = make(kind, tmp_path), make(kind, tmp_path, given={"optimizers": (None, None)})
    default.train()
    none.train()
    assert training_logs(default)[-1]["loss"] == training_logs(none)[-1]["loss"]


@pytest.mark.parametrize("kind", KINDS)
def test_i_06_a_real_optimizer_is_used(tmp_path, kind):
    student = qwen3(1)
    optimizer = torch.optim.SGD(student.model.layers[0].mlp.parameters(), lr=0.25, momentum=0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    before = weights(student)
    distiller = make(kind, tmp_path, student=student, given={"optimizers": (optimizer, schedule)}, max_grad_norm=1.0)
    distiller.train()
    after = weights(student)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    assert [entry["learning_rate"] for entry in training_logs(distiller)] == [0.25, 0.125, 0.0625, 0.03125]
    assert all("momentum_buffer" in state for state in optimizer.state.values())


@pytest.mark.parametrize("kind", KINDS)
def test_i_06_an_optimizer_of_the_wrong_model_is_refused(tmp_path, kind):
    teacher = qwen3(0)
    optimizer = torch.optim.SGD(teacher.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match=r"parameters that are not the student's"):
        make(kind, tmp_path, teacher=teacher, given={"optimizers": (optimizer, None)})
    assert issubclass(ConfigurationError, ValueError)


def test_i_06_class_and_arguments(tmp_path):
    distiller = make(
        "holistic",
        tmp_path,
        alignment=RATES,
        given={"optimizer_cls_and_kwargs": (torch.optim.RMSprop, {"momentum": 0.5})},
        max_steps=1,
    )
    distiller.train()
    inner = distiller.optimizer.optimizer
    assert type(inner) is torch.optim.RMSprop
    assert {group["momentum"] for group in inner.param_groups} == {0.5}
    assert {group["lr"] for group in inner.param_groups if group["alignment"] == "model.layers.0"} == {1e-4}


def test_callbacks_see_the_run(tmp_path):
    class Seen(transformers.TrainerCallback):
        def __init__(self):
            self.events = []

        def on_train_begin(self, args, state, control, model, optimizer, **kwargs):
            self.events.append("begin")

        def on_log(self, args, state, control, logs, **kwargs):
            self.events.append(json.loads(json.dumps(sorted(logs))))

        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 2

        def on_train_end(self, args, state, control, **kwargs):
            self.events.append(state.global_step)

    seen = Seen()
    make("response", tmp_path, given={"callbacks": [seen], "train_dataset": Rows()}, max_steps=5).train()
    assert seen.events[0] == "begin" and seen.events[-1] == 2
    assert "loss/logits" in seen.events[1]
    assert not Path(tmp_path, "checkpoint-2").exists()
