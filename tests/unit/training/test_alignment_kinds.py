"""Alignments of unusual modules, and what users may give for a loss."""

import copy
import json
import logging

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from silverspoon_kd import BlockwiseDistiller, HolisticDistiller, create_alignments
from silverspoon_kd.errors import AlignmentError, LossError
from support.architectures import ARCHITECTURES
from support.by_hand import features, mean_square
from support.distil import make, training_logs
from support.tiny import Rows, arguments, collate, qwen3, weights

LAYERS = r"model\.layers\.\d+"


def small(seed: int, **changes) -> nn.Module:
    return qwen3(seed, **{"layers": 2, "hidden": 16, **changes})


def groups_of(distiller) -> dict[str, list[Tensor]]:
    """Alignment -> the parameters that the optimizer moves for it."""
    found: dict[str, list[Tensor]] = {}
    for group in distiller.optimizer.param_groups:
        found.setdefault(group["alignment"], []).extend(group["params"])
    return found


# --- widths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["holistic", "blockwise"])
def test_g_11_the_guides_pair_learns_through_projectors(tmp_path, kind: str) -> None:
    teacher, student = small(0, hidden=16), small(1, hidden=12)
    distiller = make(
        kind, tmp_path, student=student, teacher=teacher, learning_rate=1.0, save_strategy="steps", save_steps=4
    )
    start = copy.deepcopy(distiller.root.projectors)
    keys = set(student.state_dict())
    distiller.train()
    for layer, (before, after) in enumerate(zip(start, distiller.root.projectors, strict=True)):
        assert (after.output.in_features, after.output.out_features) == (12, 16)
        assert not torch.equal(before.output.weight, after.output.weight)
        own = {id(parameter) for parameter in groups_of(distiller)[f"model.layers.{layer}"]}
        assert {id(parameter) for parameter in after.parameters()} <= own
        if kind == "blockwise":
            assert (after.input.in_features, after.input.out_features) == (16, 12)
            assert not torch.equal(before.input.weight, after.input.weight)
        else:
            assert after.input is None
    assert set(student.state_dict()) == keys == set(load_file(tmp_path / "checkpoint-4" / "model.safetensors"))
    saved = load_file(tmp_path / "checkpoint-4" / "projectors.safetensors")
    assert saved.keys() == distiller.root.projectors.state_dict().keys()
    assert all(torch.equal(saved[name], value) for name, value in distiller.root.projectors.state_dict().items())
    log = [entry["loss"] for entry in training_logs(distiller)]
    assert log[-1] < log[0]


def test_g_11_no_projector_between_equal_widths(tmp_path) -> None:
    distiller = make("blockwise", tmp_path, student=small(1), teacher=small(0))
    assert not list(distiller.root.projectors.parameters())


def test_g_11_widths_that_differ_are_refused_without_projectors(tmp_path) -> None:
    teacher, student = small(0, hidden=16), small(1, hidden=12)
    alignments = create_alignments(teacher, student, LAYERS, output_selector_index=0, auto_projector=False)
    with pytest.raises(ValueError, match=r"different widths: shapes \[\d+, \d+, 12\] and \[\d+, \d+, 16\]"):
        HolisticDistiller(teacher, alignments, args=arguments(tmp_path), train_dataset=Rows(), data_collator=collate)


@pytest.mark.parametrize("part", [{"rows": slice(0, 1)}, {"length": slice(0, 1)}], ids=["rows", "length"])
def test_g_11_nothing_is_ever_broadcast(tmp_path, part: dict[str, slice]) -> None:
    """A teacher that sees one row, or one token, of the batch would be compared with all of them."""
    rows, length = part.get("rows", slice(None)), part.get("length", slice(None))

    def cut(batch):
        return {key: value[rows, length] for key, value in batch.items()}

    distiller = make("holistic", tmp_path, student=small(1), teacher=small(0), given={"prepare_teacher_inputs": cut})
    with pytest.raises(LossError, match=r"'model\.layers\.0'.*\[4, 12, 16\] and the teacher's \[\d+, \d+, 16\] differ"):
        distiller.train()


# --- shared, nested, empty and frozen modules ------------------------------------------------------------------------


def test_g_13_the_last_run_of_a_shared_module_counts_on_both_sides(tmp_path) -> None:
    architecture = ARCHITECTURES["albert"]
    teacher, student = architecture.pair()
    name = architecture.pattern.replace("\\", "")
    outputs: dict[nn.Module, list[Tensor]] = {teacher: [], student: []}
    for model, seen in outputs.items():
        dict(model.named_modules())[name].register_forward_hook(lambda *a, seen=seen: seen.append(a[2]))
    distiller = make(
        "holistic",
        tmp_path,
        student=student,
        teacher=teacher,
        modules=architecture.pattern,
        given={"train_dataset": architecture.rows()},
        max_steps=1,
    )
    for seen in outputs.values():
        seen.clear()
    masks: list[Tensor] = []
    student.register_forward_pre_hook(lambda m, a, k: masks.append(k["attention_mask"] == 1), with_kwargs=True)
    distiller.train()
    assert [len(seen) for seen in outputs.values()] == [3, 3]
    losses = [
        mean_square(own, wanted, masks[0]).item()
        for own, wanted in zip(outputs[student], outputs[teacher], strict=True)
    ]
    assert training_logs(distiller)[0]["loss"] == pytest.approx(losses[-1], rel=1e-6)
    assert losses[-1] != pytest.approx(losses[0], rel=1e-5)  # so it matters which run counts


def test_g_14_a_module_without_parameters_has_a_loss_and_no_group(tmp_path, caplog) -> None:
    teacher, student = small(0), small(1)
    before = weights(student)
    with caplog.at_level(logging.WARNING, "silverspoon_kd"):
        distiller = make(
            "holistic",
            tmp_path,
            student=student,
            teacher=teacher,
            modules=r"model\.layers\.0\.mlp\.act_fn",
            learning_rate=1.0,
        )
        distiller.train()
    assert any("'model.layers.0.mlp.act_fn'" in record.getMessage() for record in caplog.records)
    assert training_logs(distiller)[0]["loss/model.layers.0.mlp.act_fn"] > 0
    assert groups_of(distiller).keys() == {"student"}
    changed = {name for name, value in weights(student).items() if not torch.equal(value, before[name])}
    assert "model.layers.0.mlp.gate_proj.weight" in changed  # before it
    assert not [name for name in changed if "up_proj" in name or "down_proj" in name or "layers.1" in name]


@pytest.mark.parametrize("kind", ["holistic", "blockwise"])
def test_g_14_a_frozen_layer_has_a_loss_and_stays(tmp_path, kind: str) -> None:
    teacher, student = small(0), small(1)
    student.model.layers[0].requires_grad_(False)
    before = weights(student)
    distiller = make(kind, tmp_path, student=student, teacher=teacher, learning_rate=1.0)
    distiller.train()
    log = training_logs(distiller)
    assert all(entry["loss/model.layers.0"] > 0 and entry["loss/model.layers.1"] > 0 for entry in log)
    changed = {name for name, value in weights(student).items() if not torch.equal(value, before[name])}
    assert any(name.startswith("model.layers.1.") for name in changed)
    assert not any(name.startswith("model.layers.0.") for name in changed)
    assert not any(parameter.requires_grad for parameter in student.model.layers[0].parameters())
    ids = [id(parameter) for parameters in groups_of(distiller).values() for parameter in parameters]
    assert not set(ids) & {id(parameter) for parameter in student.model.layers[0].parameters()}


def test_g_14_nested_modules_of_two_lists_share_no_parameter(tmp_path) -> None:
    """Each parameter is in one group and moves once: its innermost aligned module owns it."""
    teacher, student = small(0).double(), small(1).double()
    by_hand, rows = copy.deepcopy(student), list(Rows(4))
    names = ["model.layers.0", "model.layers.0.mlp"]
    alignments = create_alignments(teacher, student, r"model\.layers\.0", output_selector_index=0)
    alignments += create_alignments(teacher, student, r"model\.layers\.0\.mlp")
    distiller = HolisticDistiller(
        teacher,
        alignments,
        args=arguments(tmp_path, max_steps=1),
        train_dataset=rows,
        data_collator=collate,
    )
    distiller.train()
    groups = {name: {id(p) for p in parameters} for name, parameters in groups_of(distiller).items()}
    ids = [id(parameter) for parameters in groups_of(distiller).values() for parameter in parameters]
    assert len(ids) == len(set(ids))
    mlp = {id(parameter) for parameter in student.model.layers[0].mlp.parameters()}
    assert groups["model.layers.0.mlp"] == mlp
    assert groups["model.layers.0"] == {id(p) for p in student.model.layers[0].parameters()} - mlp

    batch = collate(rows)
    inputs, valid = {key: batch[key] for key in ("input_ids", "attention_mask")}, batch["attention_mask"] == 1
    own, wanted = (features(model, names, inputs)[1] for model in (by_hand, teacher))
    sum(mean_square(own[name], wanted[name], valid) for name in names).backward()
    state = dict(student.named_parameters())
    for name, parameter in by_hand.named_parameters():
        step = 0 if parameter.grad is None else 0.1 * parameter.grad
        torch.testing.assert_close(state[name], parameter - step, rtol=1e-7, atol=1e-10)


def test_g_14_one_module_aligned_twice_has_two_losses_and_one_group(tmp_path) -> None:
    teacher, student = small(0), small(1)
    both = create_alignments(teacher, student, r"model\.layers\.0", "mse")
    both += create_alignments(teacher, student, r"model\.layers\.0", "cosine")
    distiller = HolisticDistiller(
        teacher, both, args=arguments(tmp_path, max_steps=1), train_dataset=Rows(), data_collator=collate
    )
    distiller.train()
    log = training_logs(distiller)[0]
    assert {key for key in log if key.startswith("loss/")} == {"loss/model.layers.0:mse", "loss/model.layers.0:cosine"}
    assert log["loss"] == pytest.approx(log["loss/model.layers.0:mse"] + log["loss/model.layers.0:cosine"])
    ids = [id(parameter) for parameters in groups_of(distiller).values() for parameter in parameters]
    assert len(ids) == len(set(ids))
    with pytest.raises(AlignmentError, match=r"Blockwise: 'model\.layers\.0' is aligned twice"):
        BlockwiseDistiller(teacher, both, args=arguments(tmp_path), train_dataset=Rows(), data_collator=collate)


# --- losses ----------------------------------------------------------------------------------------------------------


def test_g_15_the_student_comes_first_and_the_teacher_has_no_gradient(tmp_path) -> None:
    teacher, student = small(0), small(1)
    taken: dict[str, list[Tensor]] = {"teacher": [], "student": []}
    calls: list[tuple[Tensor, Tensor]] = []

    def note(prediction: Tensor, target: Tensor) -> Tensor:
        calls.append((prediction, target))
        return (prediction - target).square().mean()

    alignments = create_alignments(teacher, student, r"model\.layers\.1", note, output_selector_index=0)
    distiller = HolisticDistiller(
        teacher, alignments, args=arguments(tmp_path, max_steps=1), train_dataset=list(Rows(4)), data_collator=collate
    )
    for key, model in (("teacher", teacher), ("student", student)):
        model.model.layers[1].register_forward_hook(lambda *a, key=key: taken[key].append(a[2].detach()))
    masks: list[Tensor] = []
    student.register_forward_pre_hook(lambda m, a, k: masks.append(k["attention_mask"] == 1), with_kwargs=True)
    distiller.train()
    (prediction, target), (mask,) = calls[0], masks
    assert len(calls) == 1 and prediction.requires_grad and not target.requires_grad
    assert torch.equal(prediction.detach(), taken["student"][0][mask])
    assert torch.equal(target, taken["teacher"][0][mask])


def test_g_15_no_scalar_is_refused_with_the_alignment(tmp_path) -> None:
    teacher, student = small(0), small(1)
    alignments = create_alignments(teacher, student, LAYERS, lambda own, wanted: (own - wanted).square())
    distiller = HolisticDistiller(
        teacher, alignments, args=arguments(tmp_path), train_dataset=Rows(), data_collator=collate
    )
    with pytest.raises(LossError, match=r"'model\.layers\.0'.*must return a scalar.*shape \[\d+, 16\]; reduce it"):
        distiller.train()


def test_the_weight_is_the_factor_of_a_term(tmp_path) -> None:
    teacher, student = small(0), small(1)
    distiller = make(
        "holistic",
        tmp_path,
        student=student,
        teacher=teacher,
        alignment={"model.layers.0": {"loss_weight": 3.0}, "model.layers.1": {"loss_weight": 0.5}},
        max_steps=1,
    )
    distiller.train()
    log = training_logs(distiller)[0]
    assert log["loss"] == pytest.approx(3.0 * log["loss/model.layers.0"] + 0.5 * log["loss/model.layers.1"])


def test_a_projector_of_the_users_own_is_trained_and_described(tmp_path) -> None:
    teacher, student = small(0, hidden=16), small(1, hidden=12)
    mine = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16))
    start = copy.deepcopy(mine)
    distiller = make(
        "holistic",
        tmp_path,
        student=student,
        teacher=teacher,
        alignment={"model.layers.1": {"output_projector": mine}},
        learning_rate=1.0,
        save_strategy="steps",
        save_steps=4,
    )
    distiller.train()
    assert distiller.root.projectors[1].output is mine
    assert all(not torch.equal(a, b) for a, b in zip(start.parameters(), mine.parameters(), strict=True))
    rows = json.loads((tmp_path / "checkpoint-4" / "distillation.json").read_text())["alignments"]
    assert rows[0]["output_projector"] == {"kind": "linear", "in": 12, "out": 16, "bias": True}
    assert rows[1]["output_projector"] == {"kind": "custom", "class": "Sequential"}


# --- modules whose output is changed in place ------------------------------------------------------------------------


def outputs_by_hook(model: nn.Module, names: list[str], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the modules gave out, copied before the model adds to it."""
    found: dict[str, Tensor] = {}
    modules = dict(model.named_modules())
    handles = [
        modules[name].register_forward_hook(lambda *given, name=name: found.update({name: given[2].clone()}))
        for name in names
    ]
    model(**inputs)
    for handle in handles:
        handle.remove()
    return found


def test_outputs_that_a_resnet_adds_to_in_place_are_compared_as_they_were(tmp_path) -> None:
    teacher, student = ARCHITECTURES["resnet"].pair()
    by_hand, inputs = copy.deepcopy(student), {"pixel_values": ARCHITECTURES["resnet"].batch()["pixel_values"]}
    alignments = create_alignments(teacher, student, r"resnet\.encoder\.stages\.\d+\.layers\.\d+\.layer")
    names = [alignment.student_module_name for alignment in alignments]
    rows = ARCHITECTURES["resnet"].rows()
    args = arguments(tmp_path, max_steps=1)
    distiller = HolisticDistiller(teacher, alignments, student_model=student, train_dataset=rows, args=args)
    distiller.train()
    with torch.no_grad():
        wanted = outputs_by_hook(teacher, names, inputs)
        given = outputs_by_hook(by_hand.train(), names, inputs)
    log = training_logs(distiller)[0]
    for name in names:
        assert log[f"loss/{name}"] == pytest.approx(float(mean_square(given[name], wanted[name], None)), rel=1e-6)
