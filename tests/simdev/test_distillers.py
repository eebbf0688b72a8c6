"""Whole runs on simulated devices give what they give on the CPU."""

import gc
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from accelerate import dispatch_model
from accelerate.state import AcceleratorState
from torch import nn
from torch.overrides import TorchFunctionMode

from silverspoon_kd.teacher.inline import InlineExecutor, InlineRun
from silverspoon_kd.teacher.world.pipeline import pipeline_map
from silverspoon_kd.tree import tensors_in
from support.distil import KINDS, make, training_logs
from support.tiny import distance, qwen3, weights

# Asynchronous, as accelerators are; both modes of the device itself: test_simdev.py, test_streams.py.
pytestmark = pytest.mark.parametrize("sim", ["async"], indirect=True)

STEPS = 3


def run(kind: str, folder: Path, monkeypatch, device: str | None, **options):
    """Train on a device (None: the CPU) and return the distiller."""
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    if device is None:
        monkeypatch.delenv("ACCELERATE_TORCH_DEVICE", raising=False)
    else:
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", device)
    options = {"max_steps": STEPS, "learning_rate": 5.0, "report_to": "none", **options}
    distiller = make(kind, folder, use_cpu=device is None, **options)
    assert distiller.args.device == torch.device(device or "cpu")
    distiller.train()
    return distiller


def losses_of(distiller) -> list[dict[str, float]]:
    """All losses of each step."""
    return [
        {key: value for key, value in entry.items() if key.split("/")[0] == "loss"}
        for entry in training_logs(distiller)
    ]


def check_equal(found, expected, tolerance: float = 1e-5) -> None:
    """Compare the losses of all steps, and the weights at the end."""
    assert len(losses_of(found)) == STEPS
    for one, other in zip(losses_of(found), losses_of(expected), strict=True):
        assert one == pytest.approx(other, rel=tolerance, abs=1e-7)
    assert distance(weights(found.root), weights(expected.root)) < tolerance
    assert distance(weights(found.root.student), weights(qwen3(1, hidden=16))) > 1e-3  # it has learned something


def devices_of(model: nn.Module) -> set[str]:
    return {str(each.device) for each in [*model.parameters(), *model.buffers()]}


ACCUMULATION = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "max_grad_norm": 0.5}
ADAMW = {"optim": "adamw_torch", "adam_epsilon": 1e-3, "learning_rate": 0.01}
# Divided by a small loss, a gradient of the usual rate would make the loss, and every rounding, grow a hundredfold.
PINNED = {"dataloader_pin_memory": True, "magnitude_aware_weighting": True, "learning_rate": 0.5}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in KINDS),
        ("response", {"alpha": 0.5}),
        ("holistic", ACCUMULATION),
        ("blockwise", ADAMW),
        ("holistic", {"gradient_checkpointing": True}),
        ("blockwise", {"backward_per_block": True}),
        ("response", PINNED),
    ],
    ids=[*KINDS, "task-loss", "accumulation", "adamw", "checkpointing", "per-block", "pinned"],
)
def test_b_09_replicated_run_on_a_device(sim, kind, options, tmp_path, monkeypatch):
    expected = run(kind, tmp_path / "cpu", monkeypatch, None, **options)
    sim.set_race_check(2)
    found = run(kind, tmp_path / "sim", monkeypatch, "sim:0", **options)
    check_equal(found, expected)
    assert devices_of(found.teacher) == devices_of(found.root) == {"sim:0"}
    assert sim.races() == []


def test_bf16_autocast_on_a_device(sim, tmp_path, monkeypatch):
    expected = run("holistic", tmp_path / "cpu", monkeypatch, None, bf16=True)
    # It knows the devices that can by their names.
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    sim.set_race_check(2)
    found = run("holistic", tmp_path / "sim", monkeypatch, "sim:0", bf16=True)
    for one, other in zip(losses_of(found), losses_of(expected), strict=True):
        assert one == pytest.approx(other, rel=0.02)
    assert found.accelerator.mixed_precision == "bf16"
    assert {each.dtype for each in found.root.parameters()} == {torch.float32}


class StudentStaysHome(TorchFunctionMode):
    """Refuse every tensor with a gradient, which is the student's, on another device than sim:0."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for each in tensors_in([list(args), dict(kwargs or {}), result]):
            if each.requires_grad and each.device.type == "sim":
                assert each.device.index == 0, f"{function} on {each.device}"
                self.seen += 1
        return result


@pytest.mark.parametrize("kind", ["response", "blockwise"])
def test_b_01_a_dispatched_teacher_stays_where_it_is(sim, kind, tmp_path, monkeypatch):
    expected = run(kind, tmp_path / "cpu", monkeypatch, None)
    gc.collect()
    devices = ["sim:1", "sim:2", "sim:3"]
    teacher = qwen3(0)
    teacher = dispatch_model(teacher, pipeline_map(teacher, devices), main_device=devices[0])
    places = dict(teacher.hf_device_map)
    layers = [next(layer.parameters()).device for layer in teacher.model.layers]
    held = [sim.memory_allocated(index) for index in (1, 2, 3)]
    sim.set_race_check(2)
    teacher.requires_grad_(False)  # as the run would do
    with StudentStaysHome() as watch:
        found = run(kind, tmp_path / "sim", monkeypatch, "sim:0", teacher=teacher)
    assert watch.seen > 1000
    check_equal(found, expected)
    assert teacher.hf_device_map == places
    assert [next(layer.parameters()).device for layer in teacher.model.layers] == layers
    assert len(set(layers)) == 3
    assert devices_of(found.root) == {"sim:0"}
    assert {str(each.device) for each in tensors_in(list(found.optimizer.state.values()))} <= {"sim:0"}
    del found
    gc.collect()
    assert [sim.memory_allocated(index) for index in (1, 2, 3)] == held
    assert sim.races() == []


def test_saving_and_loading_on_a_device(sim, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    options = {"save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch", "adam_epsilon": 1e-3}
    sim.set_race_check(2)
    whole = run("holistic", tmp_path / "whole", monkeypatch, "sim:0", **options)
    again = make("holistic", tmp_path / "whole", max_steps=STEPS, report_to="none", use_cpu=False, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert distance(weights(again.root), weights(whole.root)) < 1e-6
    assert devices_of(again.root) == {"sim:0"}
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "checkpoint-3")
    assert distance(weights(saved), weights(whole.student_model)) == 0


def test_evaluation_on_a_device(sim, tmp_path, monkeypatch):
    from support.tiny import Rows

    given = {"eval_dataset": Rows(n=6, seed=5)}
    expected = run("response", tmp_path / "cpu", monkeypatch, None, given=given).evaluate()
    sim.set_race_check(2)
    found = run("response", tmp_path / "sim", monkeypatch, "sim:0", given=given).evaluate()
    values = {key for key in expected if "loss" in key}
    assert values and values == {key for key in found if "loss" in key}
    assert {key: found[key] for key in values} == pytest.approx({key: expected[key] for key in values}, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_j_01_overlap_on_a_stream_of_its_own(sim, kind, tmp_path, monkeypatch):
    """Bit for bit the numbers without overlap, and nothing is read before it is written or freed while in use."""
    sim.set_race_check(2)
    plain = run(kind, tmp_path / "plain", monkeypatch, "sim:0", **ACCUMULATION)
    given = {"prepare_teacher_inputs": lambda batch: {**batch, "input_ids": batch["input_ids"] + 0}}
    for ahead in (0, 2):
        options = {**ACCUMULATION, "overlap_teacher_forward": True, "teacher_lookahead": ahead, "given": given}
        found = run(kind, tmp_path / f"ahead-{ahead}", monkeypatch, "sim:0", **options)
        assert found._executor._stream is not None
        assert losses_of(found) == losses_of(plain)
        assert distance(weights(found.root), weights(plain.root)) == 0
    assert sim.races() == []


def without_wait_for_the_teacher(monkeypatch):
    monkeypatch.setattr(InlineRun, "take", lambda self, tap: self._values[tap])


def without_wait_for_the_inputs(monkeypatch):
    monkeypatch.setattr(InlineExecutor, "_move_to", lambda self, stream, inputs, stack: stack.enter_context(stream))


@pytest.mark.parametrize("broken", [without_wait_for_the_teacher, without_wait_for_the_inputs])
def test_j_02_a_missing_wait_would_be_noticed(sim, broken, tmp_path, monkeypatch):
    sim.set_race_check(1)
    broken(monkeypatch)
    # The teacher's inputs are worked out on the student's stream.
    given = {"prepare_teacher_inputs": lambda batch: {**batch, "input_ids": batch["input_ids"] + 0}}
    with suppress(IndexError):  # token ids that are not there yet may be of no token
        run("holistic", tmp_path, monkeypatch, "sim:0", overlap_teacher_forward=True, given=given)
    assert sim.races() != []


def test_j_03_logged_numbers_are_read_when_they_are_there(sim, tmp_path, monkeypatch):
    """Kernels that take long would leave old values behind a copy that nobody waits for."""
    expected = run("holistic", tmp_path / "cpu", monkeypatch, None)
    sim.set_op_delay_us(200)
    check_equal(run("holistic", tmp_path / "sim", monkeypatch, "sim:0"), expected)


def test_j_04_overlap_with_a_teacher_on_several_devices(sim, tmp_path, monkeypatch):
    expected = run("blockwise", tmp_path / "cpu", monkeypatch, None)
    teacher = qwen3(0)
    teacher = dispatch_model(teacher, pipeline_map(teacher, ["sim:1", "sim:2"]), main_device="sim:1")
    sim.set_race_check(2)
    before = torch.accelerator.current_device_index()
    found = run("blockwise", tmp_path / "sim", monkeypatch, "sim:0", teacher=teacher, overlap_teacher_forward=True)
    assert torch.accelerator.current_device_index() == before
    check_equal(found, expected)
    assert sim.races() == []
