"""Every kind of model, trained two steps by the package and by hand, in float64."""

import copy
import re
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from silverspoon_kd import BlockwiseDistiller, HolisticDistiller, ResponseBasedDistiller, create_alignments
from support.architectures import ARCHITECTURES, Architecture
from support.by_hand import blockwise_loss, descend, divergence, holistic_loss, identity_or_copy
from support.tiny import arguments

RATE = 0.05
STEPS = 2

every = pytest.mark.parametrize("name", ARCHITECTURES)
narrow = pytest.mark.parametrize("name", [name for name, each in ARCHITECTURES.items() if each.narrow])
with_own_loss = pytest.mark.parametrize("name", [name for name, each in ARCHITECTURES.items() if each.own_loss])


def data_of(architecture: Architecture):
    """The rows as the architecture's users hold them: dictionaries, or tuples in a TensorDataset."""
    rows = architecture.rows()
    if architecture is ARCHITECTURES["module_with_tuple_batches"]:
        return TensorDataset(*(torch.stack([row[key] for row in rows]) for key in rows[0]))
    return rows


def run(folder, make: Callable, architecture: Architecture, **changes) -> tuple:
    """Train on the one batch again and again; return the distiller and the log of each step."""
    distiller = make(
        args=arguments(folder, max_steps=STEPS, learning_rate=RATE, **changes), train_dataset=data_of(architecture)
    )
    # Made by the distiller with their final shapes; the run by hand starts from copies.
    initial = copy.deepcopy(distiller.root.projectors)
    distiller.train()
    return distiller, [entry for entry in distiller.state.log_history if "loss" in entry], initial


def inputs_of(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The batch without labels; the decoder of T5 gets them shifted, as it does for its own loss."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    if hasattr(model, "decoder"):
        inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    return inputs


def assert_same_weights(model: nn.Module, reference: nn.Module) -> None:
    state, wanted = model.state_dict(), reference.state_dict()
    assert state.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(state[key], value, rtol=1e-6, atol=1e-8, msg=lambda text, key=key: f"{key}: {text}")


def assert_falling(log: list[dict[str, float]], history: list[dict[str, float]]) -> None:
    for entry, values in zip(log, history, strict=True):
        assert entry["loss"] == pytest.approx(sum(values.values()), rel=1e-6)
        assert {key[5:]: value for key, value in entry.items() if key.startswith("loss/")} == pytest.approx(
            values, rel=1e-6
        )
    assert 0 < log[-1]["loss"] < log[0]["loss"] < float("inf")


def moved(before: nn.Module, after: nn.Module) -> set[str]:
    old = dict(before.named_parameters())
    return {name for name, parameter in after.named_parameters() if not torch.equal(parameter, old[name])}


def assert_aligned_and_earlier_moved(before: nn.Module, after: nn.Module, architecture: Architecture, names) -> None:
    changed = moved(before, after)
    for name in names:
        own = [key for key, _ in dict(after.named_modules())[name].named_parameters(prefix=name)]
        assert any(key in changed for key in own), f"{name} did not move"
    later = [key for key, _ in after.named_parameters() if key.startswith(architecture.later)]
    assert later, f"{architecture.later} names no parameter"
    assert not changed & set(later)


def holistic(tmp_path, name: str, with_projectors: bool) -> None:
    architecture = ARCHITECTURES[name]
    teacher, student = architecture.pair(narrow=with_projectors)
    by_hand, start, batch = copy.deepcopy(student), copy.deepcopy(student), architecture.batch()
    alignments = create_alignments(teacher, student, architecture.pattern, output_selector_index=0)
    names = [alignment.student_module_name for alignment in alignments]

    distiller, log, initial = run(tmp_path, lambda **k: HolisticDistiller(teacher, alignments, **k), architecture)

    projectors = {key: identity_or_copy(pair.output) for key, pair in zip(names, initial, strict=True)}
    inputs = inputs_of(student, batch)
    history = descend(
        [by_hand.train(), *projectors.values()],
        lambda: holistic_loss(
            by_hand, teacher, names, inputs, lambda module: architecture.valid(batch, module), projectors
        ),
        RATE,
        STEPS,
    )
    assert_falling(log, history)
    assert_same_weights(student, by_hand)
    assert_aligned_and_earlier_moved(start, student, architecture, names)
    for pair, key in zip(distiller.root.projectors, names, strict=True):
        assert (pair.output is not None) is with_projectors
        if with_projectors:
            assert_same_weights(pair.output, projectors[key])
            assert moved(initial[names.index(key)], pair)


@every
def test_holistic(tmp_path, name: str) -> None:
    holistic(tmp_path, name, with_projectors=False)


@narrow
def test_holistic_with_projectors(tmp_path, name: str) -> None:
    holistic(tmp_path, name, with_projectors=True)


@every
def test_blockwise(tmp_path, name: str) -> None:
    architecture = ARCHITECTURES[name]
    teacher, student = architecture.pair(narrow=bool(architecture.narrow))
    by_hand, start, batch = copy.deepcopy(student), copy.deepcopy(student), architecture.batch()
    alignments = create_alignments(teacher, student, architecture.pattern, output_selector_index=0)
    names = [alignment.student_module_name for alignment in alignments]

    distiller, log, initial = run(tmp_path, lambda **k: BlockwiseDistiller(teacher, alignments, **k), architecture)

    outputs = {key: identity_or_copy(pair.output) for key, pair in zip(names, initial, strict=True)}
    inputs = {key: identity_or_copy(pair.input) for key, pair in zip(names, initial, strict=True)}
    history = descend(
        [by_hand.train(), *outputs.values(), *inputs.values()],
        lambda: blockwise_loss(
            by_hand,
            teacher,
            names,
            inputs_of(student, batch),
            lambda module: architecture.valid(batch, module),
            outputs,
            inputs,
        ),
        RATE,
        STEPS,
    )
    assert_falling(log, history)
    assert_same_weights(student, by_hand)
    assert_aligned_and_earlier_moved(start, student, architecture, names)
    for pair, key in zip(distiller.root.projectors, names, strict=True):
        for own, wanted in ((pair.output, outputs[key]), (pair.input, inputs[key])):
            if own is not None:
                assert_same_weights(own, wanted)


def response(tmp_path, name: str, alpha: float) -> None:
    architecture = ARCHITECTURES[name]
    teacher, student = architecture.pair()
    by_hand, batch = copy.deepcopy(student), architecture.batch()

    _, log, _ = run(tmp_path, lambda **k: ResponseBasedDistiller(student, teacher, **k), architecture, alpha=alpha)

    def logits_of(output) -> Tensor:
        return architecture.targets(output["logits"] if isinstance(output, Mapping) else output, batch)

    with torch.no_grad():
        targets = logits_of(teacher(**inputs_of(teacher, batch)))
    history = []

    def compute() -> dict[str, Tensor]:
        output = by_hand(**(batch if alpha else inputs_of(by_hand, batch)))
        values = {"logits": divergence(logits_of(output), targets)}
        if alpha:
            values["task"] = output["loss"]
        history.append({key: value.item() for key, value in values.items()})
        return {key: value * (alpha if key == "task" else 1 - alpha) for key, value in values.items()}

    weighted = descend([by_hand.train()], compute, RATE, STEPS)
    for entry, values, parts in zip(log, weighted, history, strict=True):
        assert entry["loss"] == pytest.approx(sum(values.values()), rel=1e-6)
        assert {key: entry[f"loss/{key}"] for key in parts} == pytest.approx(parts, rel=1e-6)
    assert 0 < log[-1]["loss"] < log[0]["loss"] < float("inf")
    assert_same_weights(student, by_hand)


@every
def test_response(tmp_path, name: str) -> None:
    response(tmp_path, name, alpha=0.0)


@with_own_loss
def test_response_and_own_loss(tmp_path, name: str) -> None:
    response(tmp_path, name, alpha=0.5)


def test_experts_without_a_fake_form(tmp_path) -> None:
    """The default implementation of experts: float32 only, and shapes can be found only by a real forward."""
    architecture = ARCHITECTURES["mixtral"]
    teacher, student = (architecture.build(seed, experts_implementation=None) for seed in (0, 1))
    assert student.config._experts_implementation == "grouped_mm"
    by_hand, batch = copy.deepcopy(student), architecture.batch()
    alignments = create_alignments(teacher, student, r"model\.layers\.\d+\.mlp")
    names = [alignment.student_module_name for alignment in alignments]
    _, log, _ = run(tmp_path, lambda **k: HolisticDistiller(teacher, alignments, **k), architecture)
    history = descend(
        [by_hand.train()],
        lambda: holistic_loss(
            by_hand,
            teacher,
            names,
            inputs_of(student, batch),
            lambda module: architecture.valid(batch, module),
            {name: nn.Identity() for name in names},
        ),
        RATE,
        STEPS,
    )
    assert [entry["loss"] for entry in log] == pytest.approx([sum(values.values()) for values in history], rel=1e-4)
    for name, value in student.state_dict().items():
        torch.testing.assert_close(value, by_hand.state_dict()[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["t5", "gpt2", "bert"])
def test_label_smoothing_of_the_own_loss(tmp_path, name: str) -> None:
    architecture = ARCHITECTURES[name]
    teacher, student = architecture.pair()
    batch, by_hand = architecture.batch(), copy.deepcopy(student)
    _, log, _ = run(
        tmp_path,
        lambda **k: ResponseBasedDistiller(student, teacher, **k),
        architecture,
        alpha=0.5,
        label_smoothing_factor=0.1,
    )
    logits, labels = by_hand(**inputs_of(by_hand, batch)).logits, batch["labels"]
    if name == "gpt2":
        logits, labels = logits[:, :-1], labels[:, 1:]
    wanted = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    assert log[0]["loss/task"] == pytest.approx(wanted.item(), rel=1e-6)
    assert log[0]["loss"] == pytest.approx(0.5 * (log[0]["loss/task"] + log[0]["loss/logits"]), rel=1e-6)


def test_the_decoder_mask_of_t5_is_the_decoders_own() -> None:
    """What makes the T5 cases above worth something: the two sides have other masks of the same shape."""
    batch, valid = ARCHITECTURES["t5"].batch(), ARCHITECTURES["t5"].valid
    encoder, decoder = valid(batch, "encoder.block.0"), valid(batch, "decoder.block.0")
    assert encoder.shape == decoder.shape and not torch.equal(encoder, decoder)


@pytest.mark.parametrize("aligned", ["encoder.block.1", "decoder.block.1"])
def test_a_block_of_t5_learns_alone(tmp_path, aligned: str) -> None:
    """It takes in the encoder's states and the position bias of block 0; its loss must not move what made them."""
    architecture = ARCHITECTURES["t5"]
    teacher, student = architecture.pair()
    start = copy.deepcopy(student)
    alignments = create_alignments(teacher, student, re.escape(aligned), output_selector_index=0)
    run(tmp_path, lambda **k: BlockwiseDistiller(teacher, alignments, **k), architecture)
    changed = moved(start, student)
    assert changed and all(name.startswith(aligned + ".") for name in changed)


def test_gpt2_and_t5_share_their_embeddings() -> None:
    gpt2, t5 = ARCHITECTURES["gpt2"].build(0), ARCHITECTURES["t5"].build(0)
    assert gpt2.lm_head.weight is gpt2.transformer.wte.weight
    assert t5.encoder.embed_tokens.weight is t5.decoder.embed_tokens.weight
