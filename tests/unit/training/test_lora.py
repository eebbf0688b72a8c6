"""LoRA students: the adapters learn, the base does not, and the base can be the teacher."""

import copy

import pytest
import torch
from torch import Tensor, nn

from silverspoon_kd import create_alignments
from silverspoon_kd.errors import ConfigurationError
from silverspoon_kd.teacher.hygiene import adapters_off
from support.by_hand import divergence, features, mean_square
from support.distil import KINDS, make, training_logs
from support.tiny import Rows, collate, qwen3, weights

peft = pytest.importorskip("peft")

every_kind = pytest.mark.parametrize("kind", KINDS)


def base(seed: int = 1, **changes) -> nn.Module:
    return qwen3(seed, **{"layers": 2, "hidden": 16, **changes})


def lora(model: nn.Module | None = None, **changes) -> nn.Module:
    """A LoRA model, fresh: all B matrices are 0."""
    torch.manual_seed(3)
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **changes})
    return peft.get_peft_model(base() if model is None else model, config)


def perturbed(model: nn.Module) -> nn.Module:
    """The same with adapters that do something."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    return model


def moved(before: dict[str, Tensor], model: nn.Module) -> set[str]:
    return {name for name, value in weights(model).items() if not torch.equal(value, before[name])}


def flags(model: nn.Module) -> dict[str, object]:
    """All that adapters_off could forget to put back."""
    layers = [module for module in model.modules() if isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer)]
    return {
        "trainable": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "disabled": [layer.disable_adapters for layer in layers],
        "active": [list(layer.active_adapters) for layer in layers],
        "status": model.get_model_status().enabled,
    }


# --- training --------------------------------------------------------------------------------------------------------


@every_kind
def test_adapters_move_and_the_base_does_not(tmp_path, kind: str) -> None:
    student, teacher = lora(), base(0)
    before = weights(student)
    distiller = make(kind, tmp_path, student=student, teacher=teacher, learning_rate=1.0)
    distiller.train()
    changed = moved(before, student)
    trained = {name for name, parameter in student.named_parameters() if parameter.requires_grad}
    assert changed and changed <= trained
    assert {name for name in trained if "lora_B" in name} <= changed  # in all layers
    assert all("lora_" in name for name in trained)
    losses = [entry["loss"] for entry in training_logs(distiller)]
    assert all(0 < loss < float("inf") for loss in losses)


def test_the_base_and_the_adapters_give_the_expected_step(tmp_path) -> None:
    """One step of plain SGD, against autograd on a copy."""
    student, teacher = perturbed(lora(base().double())).double(), base(0).double()
    by_hand, rows = copy.deepcopy(student), list(Rows(4))
    make("response", tmp_path, student=student, teacher=teacher, given={"train_dataset": rows}, max_steps=1).train()
    batch = collate(rows)
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    valid = batch["labels"][:, 1:] != -100
    loss = divergence(by_hand(**inputs).logits[:, :-1][valid], teacher(**inputs).logits[:, :-1][valid])
    loss.backward()
    own = dict(student.named_parameters())
    for name, parameter in by_hand.named_parameters():
        step = 0 if parameter.grad is None else 0.1 * parameter.grad
        torch.testing.assert_close(own[name], parameter - step, rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize("pattern", [r"model\.layers\.\d+", r"model\.layers\.\d+\.self_attn\.[qv]_proj", "lm_head"])
def test_alignments_have_clean_names(tmp_path, pattern: str) -> None:
    student, teacher = perturbed(lora()), base(0)
    found = create_alignments(teacher, student, pattern, output_selector_index=0)
    names = [each.student_module_name for each in found]
    assert names == [each.teacher_module_name for each in found]
    assert not any("base" in name for name in names)
    before, rows = copy.deepcopy(student), list(Rows(4))
    distiller = make(
        "holistic", tmp_path, student=student, teacher=teacher, modules=pattern, given={"train_dataset": rows}
    )
    distiller.train()
    batch = collate(rows)
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    with torch.no_grad():
        targets = features(teacher, names, inputs)[1]
        own = features(before, [f"base_model.model.{name}" for name in names], inputs)[1]
    log = training_logs(distiller)[0]
    for name in names:
        wanted = mean_square(own[f"base_model.model.{name}"], targets[name], batch["attention_mask"] == 1)
        assert log[f"loss/{name}"] == pytest.approx(wanted.item(), rel=1e-5)


def test_only_adapters_that_a_loss_reaches_move_and_all_can_train_afterwards(tmp_path) -> None:
    student = lora()
    before, trainable = weights(student), flags(student)["trainable"]
    make("holistic", tmp_path, student=student, teacher=base(0), modules=r"model\.layers\.0", learning_rate=1.0).train()
    assert {name for name in moved(before, student)} and not [
        name for name in moved(before, student) if ".layers.1." in name
    ]
    assert flags(student)["trainable"] == trainable


# --- activation checkpointing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
@every_kind
def test_g_16_gradients_reach_the_adapters_with_checkpointing(tmp_path, kind: str, reentrant: bool) -> None:
    results = []
    for index, checkpointing in enumerate((False, True)):
        student, teacher = lora(), base(0)
        before = weights(student)
        distiller = make(
            kind,
            tmp_path / str(index),
            student=student,
            teacher=teacher,
            max_steps=2,
            learning_rate=1.0,
            gradient_checkpointing=checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": reentrant},
        )
        distiller.train()
        changed = moved(before, student)
        assert {name for name in before if "lora_B" in name} <= changed
        assert all("lora_" in name for name in changed)
        results.append(weights(student))
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-6, atol=1e-8)


# --- the base as the teacher -----------------------------------------------------------------------------------------


def same_base(given: str) -> tuple[nn.Module, nn.Module]:
    model = base()
    student = lora(model, lora_dropout=0.5)
    return student, model if given == "the object" else student.get_base_model()


@every_kind
@pytest.mark.parametrize("given", ["the object", "get_base_model"])
def test_c_11_fresh_adapters_have_no_loss(tmp_path, kind: str, given: str) -> None:
    student, teacher = same_base(given)
    before = weights(student)
    distiller = make(kind, tmp_path, student=student, teacher=teacher)
    distiller.train()
    assert [entry["loss"] for entry in training_logs(distiller)] == [0.0] * 4
    assert not moved(before, student)


@every_kind
def test_c_11_the_teacher_is_the_base_without_adapters(tmp_path, kind: str) -> None:
    student = perturbed(lora())
    start = copy.deepcopy(student)
    rows, names = list(Rows(4)), ["model.layers.0", "model.layers.1"]
    distiller = make(
        kind,
        tmp_path,
        student=student,
        teacher=student.get_base_model(),
        given={"train_dataset": rows},
        learning_rate=0.01,
    )
    distiller.train()

    batch = collate(rows)
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    plain = base()  # the same weights, and no adapters at all
    wrapped = [f"base_model.model.{name}" for name in names]
    with torch.no_grad():
        taken, targets, output = features(plain, names, inputs)
        replaced = {w: (lambda n=n: taken[n]) for w, n in zip(wrapped, names, strict=True)}
        _, own, logits = features(start, wrapped, inputs, replaced if kind == "blockwise" else None)
        if kind == "response":
            valid = batch["labels"][:, 1:] != -100
            wanted = divergence(logits.logits[:, :-1][valid], output.logits[:, :-1][valid])
        else:
            wanted = sum(
                mean_square(own[w], targets[n], batch["attention_mask"] == 1)
                for w, n in zip(wrapped, names, strict=True)
            )
    assert wanted > 0
    log = training_logs(distiller)
    assert log[0]["loss"] == pytest.approx(wanted.item(), rel=1e-4)
    assert log[-1]["loss"] < log[0]["loss"]
    changed = moved(weights(start), student)
    assert changed and all("lora_" in name for name in changed)


def test_c_11_the_teachers_forward_leaves_modes_and_flags() -> None:
    student = lora(lora_dropout=0.5)
    student.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    student.set_adapter("default")
    frozen = next(p for n, p in student.named_parameters() if "layers.0.self_attn.q_proj.lora_A.default" in n)
    frozen.requires_grad_(False)
    student.base_model.model.model.layers[0].eval()
    before = flags(student)
    assert before["status"] is True
    for error in (None, ArithmeticError):
        try:
            with adapters_off(student):
                assert not any(module.training for module in student.modules())
                assert student.get_model_status().enabled is False
                if error is not None:
                    raise error
        except ArithmeticError:
            pass
        assert flags(student) == before


@every_kind
def test_c_11_training_leaves_modes_and_flags(tmp_path, kind: str) -> None:
    student = perturbed(lora())
    before = flags(student)
    make(kind, tmp_path, student=student, teacher=student.get_base_model(), modules=r"model\.layers\.0").train()
    assert flags(student) == before


def test_c_11_other_shared_parameters_are_refused(tmp_path) -> None:
    """Not the PEFT model itself, and not another model over the same base."""
    model = base()
    student = lora(model)
    with pytest.raises(ConfigurationError, match="are the same object.*or pass a PEFT student and its base model"):
        make("response", tmp_path, student=student, teacher=student)
    twin = peft.PeftModel(model, peft.LoraConfig(target_modules=["o_proj"]), adapter_name="twin")
    with pytest.raises(ConfigurationError, match="share the parameter"):
        make("response", tmp_path, student=student, teacher=twin)
    with pytest.raises(ConfigurationError, match="share the parameter"):
        make("response", tmp_path, student=model, teacher=student)
    with pytest.raises(ConfigurationError, match="share the parameter"):
        make("response", tmp_path, student=student, teacher=model.model)


def test_c_11_checkpointing_and_the_shared_base(tmp_path) -> None:
    results = []
    for index, checkpointing in enumerate((False, True)):
        student = perturbed(lora())
        distiller = make(
            "response",
            tmp_path / str(index),
            student=student,
            teacher=student.get_base_model(),
            gradient_checkpointing=checkpointing,
        )
        distiller.train()
        results.append(weights(student))
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-6, atol=1e-8)


# --- saving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True], ids=["teacher apart", "base as teacher"])
def test_saved_adapters_load_again(tmp_path, shared: bool) -> None:
    student = perturbed(lora())
    teacher = student.get_base_model() if shared else base(0)
    distiller = make("response", tmp_path, student=student, teacher=teacher, save_strategy="steps", save_steps=2)
    distiller.train()
    distiller.save_model(str(tmp_path / "final"))
    ids = {"input_ids": torch.arange(1, 9).view(1, 8)}
    wanted = student.eval()(**ids).logits
    for folder in (tmp_path / "final", tmp_path / "checkpoint-4"):
        assert (folder / "adapter_model.safetensors").is_file() and not (folder / "model.safetensors").exists()
        loaded = peft.PeftModel.from_pretrained(base(), folder).eval()
        torch.testing.assert_close(loaded(**ids).logits, wanted, rtol=0, atol=0)
    earlier = peft.PeftModel.from_pretrained(base(), tmp_path / "checkpoint-2").eval()
    assert not torch.equal(earlier(**ids).logits, wanted)


def test_resumed_training_is_exact(tmp_path) -> None:
    def run(folder, steps: int, resume: bool) -> nn.Module:
        student = lora()
        distiller = make(
            "holistic", folder, student=student, teacher=base(0), max_steps=steps, save_strategy="steps", save_steps=2
        )
        distiller.train(resume_from_checkpoint=resume or None)
        return student

    whole = run(tmp_path / "whole", 4, resume=False)
    run(tmp_path / "parts", 2, resume=False)
    resumed = run(tmp_path / "parts", 4, resume=True)
    assert not moved(weights(whole), resumed)
