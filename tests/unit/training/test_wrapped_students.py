"""Students that are compiled or wrapped when the distiller gets them."""

import logging

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from silverspoon_kd.capture import clean_name
from silverspoon_kd.errors import ConfigurationError
from support.distil import make, training_logs
from support.tiny import qwen3, weights

LAYERS = r"model\.layers\.\d+"
INNER = r"model\.layers\.\d+\.self_attn"


def small() -> nn.Module:
    return qwen3(1, layers=2, hidden=12)


def checkpointed(model: nn.Module) -> nn.Module:
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Qwen3DecoderLayer))
    return model


WRAPPERS = {
    "eager": lambda model: torch.compile(model, backend="eager"),
    "aot_eager": lambda model: torch.compile(model, backend="aot_eager"),
    "checkpointed": checkpointed,
    "checkpointed_and_compiled": lambda model: torch.compile(checkpointed(model), backend="eager"),
}


def train(folder, kind: str, student: nn.Module, **changes):
    distiller = make(
        kind, folder, student=student, teacher=qwen3(0, layers=2, hidden=16), **{"max_steps": 2, **changes}
    )
    distiller.train()
    return distiller


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_g_09_torch_compile_is_refused_with_a_reason(tmp_path, backend: str) -> None:
    student = small()
    with pytest.raises(ConfigurationError, match="torch_compile=True cannot work with distillation hooks"):
        train(tmp_path, "holistic", student, torch_compile=True, torch_compile_backend=backend)
    assert not [module for module in student.modules() if module._forward_hooks]


@pytest.mark.parametrize("role", ["student", "teacher"])
def test_g_09_the_model_inside_a_compiled_one_is_used_with_a_warning(tmp_path, caplog, role: str) -> None:
    models = {"student": small(), "teacher": qwen3(0, layers=2, hidden=16)}
    inside = models[role]
    models[role] = torch.compile(inside, backend="eager")
    with caplog.at_level(logging.WARNING, "silverspoon_kd"):
        distiller = make("holistic", tmp_path, **models, max_steps=1)
    warned = [record.getMessage() for record in caplog.records]
    assert warned == [
        f"The {role} is compiled. Graphs do not run the hooks that record activations, "
        "so the Qwen3ForCausalLM inside is used as it is."
    ]
    assert {"student": distiller.student_model, "teacher": distiller.teacher}[role] is inside
    before = weights(distiller.student_model)
    distiller.train()
    assert any(not torch.equal(value, before[name]) for name, value in weights(distiller.student_model).items())


def test_g_09_a_compiled_part_between_aligned_modules_stays_compiled(tmp_path) -> None:
    plain, student = small(), small()
    student.model.layers[0].mlp = torch.compile(student.model.layers[0].mlp, backend="eager")
    for name, model in (("plain", plain), ("compiled", student)):
        train(tmp_path / name, "holistic", model)
    assert "_orig_mod" in student.model.layers[0].mlp._modules
    own = {clean_name(name): value for name, value in weights(student).items()}
    for name, value in weights(plain).items():
        torch.testing.assert_close(own[name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("wrapper", "modules"),
    [
        ("eager", LAYERS),
        ("aot_eager", INNER),
        ("checkpointed", LAYERS),
        ("checkpointed", INNER),
        ("checkpointed_and_compiled", LAYERS),
    ],
)
@pytest.mark.parametrize("kind", ["holistic", "blockwise"])
def test_g_09_e_08_a_wrapped_student_trains_as_the_plain_one(tmp_path, kind: str, wrapper: str, modules: str) -> None:
    plain, wrapped = small(), WRAPPERS[wrapper](small())
    runs = [
        train(tmp_path / name, kind, student, modules=modules)
        for name, student in (("plain", plain), ("wrapped", wrapped))
    ]
    wanted, logs = ([e for e in training_logs(run)] for run in runs)
    assert [entry["loss"] for entry in logs] == pytest.approx([entry["loss"] for entry in wanted], rel=1e-5)
    assert [set(entry) for entry in logs] == [set(entry) for entry in wanted]  # clean names in the log
    own = {clean_name(name): value for name, value in weights(wrapped).items()}
    for name, value in weights(plain).items():
        torch.testing.assert_close(own[name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("wrapper", ["eager", "checkpointed"])
def test_g_09_e_08_logits_of_a_wrapped_student(tmp_path, wrapper: str) -> None:
    plain, wrapped = small(), WRAPPERS[wrapper](small())
    for name, student in (("plain", plain), ("wrapped", wrapped)):
        train(tmp_path / name, "response", student, alpha=0.5)
    own = {clean_name(name): value for name, value in weights(wrapped).items()}
    for name, value in weights(plain).items():
        torch.testing.assert_close(own[name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("wrapper", ["eager", "checkpointed"])
def test_e_08_a_wrapped_student_is_saved_under_clean_names(tmp_path, wrapper: str) -> None:
    student = WRAPPERS[wrapper](small())
    distiller = train(tmp_path, "holistic", student, save_strategy="steps", save_steps=2)
    loaded, report = type(small()).from_pretrained(tmp_path / "checkpoint-2", output_loading_info=True)
    assert not any(report.values())
    own = {clean_name(name): value for name, value in weights(student).items()}
    for name, value in weights(loaded).items():
        assert torch.equal(own[name], value)
    again = WRAPPERS[wrapper](small())
    resumed = make("holistic", tmp_path, student=again, teacher=qwen3(0, layers=2, hidden=16), max_steps=3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 3 and distiller.state.global_step == 2
