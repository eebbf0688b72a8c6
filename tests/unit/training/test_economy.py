"""Work that nobody needs is not done, and nothing of a past step is kept."""

import copy
import gc
from collections import Counter

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from support.by_hand import blockwise_loss, descend
from support.distil import KINDS, make
from support.tiny import Rows, collate, distance, qwen3, weights

STEPS = 3


def pair(**changes) -> tuple[nn.Module, nn.Module]:
    return qwen3(0, layers=4, hidden=16, **changes), qwen3(1, layers=4, hidden=12, **changes)


def count_calls(model: nn.Module) -> Counter[str]:
    """From now on, how often each module runs."""
    calls: Counter[str] = Counter()
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: calls.update([name]))
    return calls


def run(folder, kind: str, modules: str, **changes) -> tuple[Counter[str], Counter[str]]:
    """The calls of the teacher's and the student's modules in STEPS steps, probing left out."""
    teacher, student = pair()
    distiller = make(kind, folder, student=student, teacher=teacher, modules=modules, max_steps=STEPS, **changes)
    calls = count_calls(teacher), count_calls(student)
    distiller.train()
    return calls


def later_than(layer: int) -> list[str]:
    return [*(f"model.layers.{index}" for index in range(layer + 1, 4)), "model.norm", "lm_head"]


@pytest.mark.parametrize("kind", ["holistic", "blockwise"])
@pytest.mark.parametrize(("modules", "last"), [(r"model\.layers\.[01]", 1), (r"model\.layers\.\d+", 3)])
def test_nothing_runs_after_the_last_aligned_module(tmp_path, kind: str, modules: str, last: int) -> None:
    for calls in run(tmp_path, kind, modules):
        for index in range(last + 1):
            assert calls[f"model.layers.{index}"] == STEPS
            assert calls[f"model.layers.{index}.mlp.down_proj"] == STEPS
        for name in later_than(last):
            assert not [each for each in calls if each == name or each.startswith(name + ".")], name


@pytest.mark.parametrize("kind", ["holistic", "blockwise"])
def test_only_the_student_goes_on_for_its_own_loss(tmp_path, kind: str) -> None:
    teacher, student = run(tmp_path, kind, r"model\.layers\.[01]", alpha=0.5)
    for name in later_than(1):
        assert teacher[name] == 0 and student[name] == STEPS


BETWEEN = ["model.layers.0.mlp", "model.layers.2.mlp"]


@pytest.mark.parametrize("changes", [{}, {"gradient_checkpointing": True}], ids=["plain", "checkpointed"])
def test_student_layers_between_the_blocks_do_not_run(tmp_path, changes: dict) -> None:
    teacher, student = run(tmp_path, "blockwise", r"model\.layers\.[13]", **changes)
    for name in BETWEEN:
        assert teacher[name] == STEPS and student[name] == 0


def test_student_layers_between_the_blocks_run_for_its_own_loss(tmp_path) -> None:
    _, student = run(tmp_path, "blockwise", r"model\.layers\.[13]", alpha=0.5)
    assert all(student[name] == STEPS for name in BETWEEN)


def test_blocks_with_layers_between_them_learn_as_by_hand(tmp_path) -> None:
    teacher, student = (each.double() for each in pair())
    by_hand, names = copy.deepcopy(student), ["model.layers.1", "model.layers.3"]
    data = [Rows(4)[index] for index in range(4)]
    distiller = make(
        "blockwise",
        tmp_path,
        student=student,
        teacher=teacher,
        modules=r"model\.layers\.[13]",
        given={"train_dataset": data},
        max_steps=STEPS,
    )
    first = [copy.deepcopy(each) for each in distiller.root.projectors]
    distiller.train()
    batch = collate(data)
    inputs, valid = {name: batch[name] for name in ("input_ids", "attention_mask")}, batch["attention_mask"].bool()
    projectors = {name: each.output for name, each in zip(names, first, strict=True)}
    entering = {name: each.input for name, each in zip(names, first, strict=True)}
    descend(
        [by_hand.train(), *projectors.values(), *entering.values()],
        lambda: blockwise_loss(by_hand, teacher, names, inputs, lambda _: valid, projectors, entering),
        rate=0.1,
        steps=STEPS,
    )
    assert distance(weights(student), weights(by_hand)) < 1e-7
    assert distance(weights(student), weights(pair()[1])) > 1e-4


def test_each_model_runs_once_a_step_for_logits(tmp_path) -> None:
    for calls in run(tmp_path, "response", "", alpha=0.5):
        assert set(calls.values()) == {STEPS}


@pytest.mark.parametrize("kind", KINDS)
def test_one_forward_of_each_model_for_every_micro_batch(tmp_path, kind: str) -> None:
    for calls in run(
        tmp_path, kind, r"model\.layers\.\d+", gradient_accumulation_steps=2, per_device_train_batch_size=2
    ):
        assert calls["model.layers.0"] == 2 * STEPS


def test_an_inner_module_ends_the_teachers_forward_in_the_middle_of_a_layer(tmp_path) -> None:
    for calls in run(tmp_path, "holistic", r"model\.layers\.1\.self_attn"):
        assert calls["model.layers.1.self_attn"] == STEPS
        assert calls["model.layers.1.mlp"] == calls["model.layers.2"] == 0


@pytest.mark.parametrize("kind", ["holistic", "blockwise"])
def test_evaluation_without_predictions_stops_as_well(tmp_path, kind: str) -> None:
    teacher, student = pair()
    distiller = make(
        kind,
        tmp_path,
        student=student,
        teacher=teacher,
        modules=r"model\.layers\.[01]",
        given={"eval_dataset": Rows(8)},
    )
    calls = count_calls(teacher), count_calls(student)
    distiller.evaluate()
    for each in calls:
        assert each["model.layers.1"] == 1 and each["model.layers.2"] == each["lm_head"] == 0


def test_no_layer_is_stopped_for_predictions(tmp_path) -> None:
    teacher, student = pair()
    distiller = make(
        "holistic",
        tmp_path,
        student=student,
        teacher=teacher,
        modules=r"model\.layers\.[01]",
        given={"eval_dataset": Rows(8), "compute_metrics": lambda outcome: {"width": outcome.predictions.shape[-1]}},
    )
    calls = count_calls(teacher), count_calls(student)
    assert distiller.evaluate()["eval_width"] == 64
    assert calls[0]["lm_head"] == 0 and calls[1]["lm_head"] == 1


# --- memory ----------------------------------------------------------------------------------------------------------


class Census(TrainerCallback):
    """Counts the living tensors of a shape after each step, and the hooks on the models."""

    def __init__(self, shapes: list[tuple[int, ...]], models: list[nn.Module]) -> None:
        self.shapes, self.models = shapes, models
        self.tensors: list[int] = []
        self.hooks: list[int] = []

    def on_step_end(self, args, state, control, **kwargs) -> None:
        gc.collect(0)
        self.tensors.append(
            sum(1 for each in gc.get_objects() if type(each) is torch.Tensor and tuple(each.shape) in self.shapes)
        )
        self.hooks.append(
            sum(
                len(module._forward_hooks) + len(module._forward_pre_hooks)
                for model in self.models
                for module in model.modules()
            )
        )


@pytest.mark.parametrize("changes", [{}, {"gradient_checkpointing": True}], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("kind", KINDS)
def test_g_08_features_and_hooks_of_a_step_are_gone_after_it(tmp_path, kind: str, changes: dict) -> None:
    teacher, student = qwen3(0, layers=2, hidden=24, num_attention_heads=2), qwen3(1, layers=2, hidden=20)
    # Features, and logits, of both sides: [batch, length, width].
    census = Census([(4, 12, 24), (4, 12, 20), (4, 12, 64)], [teacher, student])
    distiller = make(
        kind,
        tmp_path,
        student=student,
        teacher=teacher,
        given={"callbacks": [census], "train_dataset": Rows(32)},
        max_steps=50,
        logging_steps=50,
        **changes,
    )
    gc.collect()
    gc.freeze()  # thousands of objects of others that need not be looked at 50 times
    distiller.train()
    assert len(census.tensors) == 50
    assert set(census.tensors) == {0}
    # transformers itself makes the embeddings require a gradient for checkpointing, with one hook that stays.
    assert set(census.hooks) == {len(changes)}
