"""Recomputation in the backward changes no number, whatever is aligned."""

import logging

import pytest
import torch
from torch import nn

from support.architectures import ARCHITECTURES
from support.distil import make, training_logs
from support.tiny import Rows, qwen3, weights

PATTERNS = {
    "whole layers": r"model\.layers\.\d+",
    "mlp": r"model\.layers\.\d+\.mlp",
    "self_attn": r"model\.layers\.\d+\.self_attn",
    "norm": r"model\.layers\.\d+\.post_attention_layernorm",
    "inner of one": r"model\.layers\.0\.mlp\.down_proj",
}

# What the inner modules give is small: a rate at which the weights really move.
RATES = {"whole layers": 1.0, "mlp": 1.0, "self_attn": 1.0, "norm": 0.1, "inner of one": 1.0}


def train(folder, kind: str, pattern: str, student: nn.Module | None = None, **changes):
    student = qwen3(1, layers=2, hidden=12) if student is None else student
    distiller = make(
        kind,
        folder,
        student=student,
        teacher=qwen3(0, layers=2, hidden=16),
        modules=pattern,
        given={"eval_dataset": Rows(8, seed=5)},
        **{"max_steps": 3, **changes},
    )
    distiller.train()
    return weights(distiller.root), [entry["loss"] for entry in training_logs(distiller)]


def assert_equal(one: tuple, other: tuple) -> None:
    assert other[1] == pytest.approx(one[1], rel=1e-6)
    for name, value in one[0].items():
        torch.testing.assert_close(other[0][name], value, rtol=1e-5, atol=1e-7, msg=lambda t, n=name: f"{n}: {t}")


@pytest.mark.parametrize("modules", PATTERNS)
@pytest.mark.parametrize("kind", ["holistic", "blockwise"])
def test_g_06_gradients_are_those_without_checkpointing(tmp_path, kind: str, modules: str) -> None:
    pattern, rate = PATTERNS[modules], RATES[modules]
    plain = train(tmp_path / "plain", kind, pattern, learning_rate=rate)
    start = weights(qwen3(1, layers=2, hidden=12))
    assert any(not torch.equal(value, plain[0][f"student.{name}"]) for name, value in start.items())
    for reentrant in (False, True):
        recomputed = train(
            tmp_path / str(reentrant),
            kind,
            pattern,
            learning_rate=rate,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": reentrant},
        )
        assert_equal(plain, recomputed)


def test_g_06_forwards_are_really_run_twice(tmp_path) -> None:
    """Otherwise the cases above would show nothing."""
    for checkpointing, times in ((False, 1), (True, 2)):
        calls: list[bool] = []
        student = qwen3(1, layers=2, hidden=12)
        student.model.layers[0].self_attn.register_forward_hook(
            lambda module, *_, calls=calls: calls.append(module.training)
        )
        train(tmp_path, "holistic", PATTERNS["whole layers"], student, gradient_checkpointing=checkpointing)
        assert calls.count(True) == times * 3  # False: probing, in evaluation mode


def test_g_06_reentrant_checkpointing_is_replaced_with_a_warning(tmp_path, caplog) -> None:
    with caplog.at_level(logging.WARNING, "silverspoon_kd"):
        train(
            tmp_path,
            "holistic",
            PATTERNS["mlp"],
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": True},
        )
    warned = [record.getMessage() for record in caplog.records if "use_reentrant" in record.getMessage()]
    assert warned == ["use_reentrant=True hides activations from the losses; use_reentrant=False is used instead."]


@pytest.mark.parametrize("kind", ["holistic", "blockwise", "response"])
def test_g_07_evaluation_between_the_steps(tmp_path, kind: str) -> None:
    changes = {"eval_strategy": "steps", "eval_steps": 1, "gradient_accumulation_steps": 2, "learning_rate": 0.5}
    plain = train(tmp_path / "plain", kind, PATTERNS["mlp"], **changes)
    assert_equal(plain, train(tmp_path / "again", kind, PATTERNS["mlp"], gradient_checkpointing=True, **changes))


def test_g_06_with_the_students_own_loss(tmp_path) -> None:
    plain = train(tmp_path / "plain", "blockwise", PATTERNS["self_attn"], alpha=0.5)
    assert_equal(
        plain, train(tmp_path / "again", "blockwise", PATTERNS["self_attn"], alpha=0.5, gradient_checkpointing=True)
    )


@pytest.mark.parametrize("kind", ["holistic", "blockwise"])
@pytest.mark.parametrize("name", ["t5", "bert", "vit", "gpt2"])
def test_g_06_other_architectures(tmp_path, name: str, kind: str) -> None:
    architecture = ARCHITECTURES[name]
    results = []
    for checkpointing in (False, True):
        teacher, student = architecture.pair(narrow=True)
        distiller = make(
            kind,
            tmp_path / str(checkpointing),
            student=student,
            teacher=teacher,
            modules=architecture.pattern,
            given={"train_dataset": architecture.rows()},
            gradient_checkpointing=checkpointing,
            max_steps=2,
            learning_rate=0.05,
        )
        distiller.train()
        results.append((weights(distiller.root), [entry["loss"] for entry in training_logs(distiller)]))
    assert_equal(*results)


def test_backward_per_block_changes_no_number(tmp_path) -> None:
    plain = train(tmp_path / "plain", "blockwise", PATTERNS["whole layers"])
    assert_equal(plain, train(tmp_path / "again", "blockwise", PATTERNS["whole layers"], backward_per_block=True))
