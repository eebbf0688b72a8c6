"""Which tensor of a module's output is compared."""

import pytest
import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from silverspoon_kd import HolisticDistiller, create_alignments
from silverspoon_kd.capture import Capture, Tap, Trace, select, select_logits
from silverspoon_kd.errors import AlignmentError
from support.architectures import ARCHITECTURES, bloom
from support.by_hand import features, mean_square
from support.tiny import Rows, arguments, collate

A, B = torch.zeros(3, 5, 4), torch.ones(3, 5, 4)

LAYERS = {
    "llama": (ARCHITECTURES["llama"].build, "model.layers.1"),
    "qwen3": (ARCHITECTURES["qwen3"].build, "model.layers.1"),
    "gpt2": (ARCHITECTURES["gpt2"].build, "transformer.h.1"),
    "bert": (ARCHITECTURES["bert"].build, "bert.encoder.layer.1"),
    "bloom": (bloom, "transformer.h.1"),
    "t5": (ARCHITECTURES["t5"].build, "decoder.block.1"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_g_04_the_feature_is_the_whole_batch(name: str) -> None:
    build, layer = LAYERS[name]
    model = build(0).eval()
    batch = {"input_ids": torch.randint(1, 60, (3, 7))}
    if name == "t5":
        batch["decoder_input_ids"] = batch["input_ids"]
    tap = Tap(layer, "output", 0)
    capture = Capture(model, [tap], Trace())
    capture.run(lambda: model(**batch), may_stop=False)
    assert capture.values[tap].shape[:2] == (3, 7)
    torch.testing.assert_close(capture.values[tap], features(model, [layer], batch)[1][layer])


def test_g_04_some_layers_return_tuples_and_some_tensors() -> None:
    """Otherwise the case above would show nothing."""
    kinds = set()
    for name in ("llama", "bloom", "t5"):
        build, layer = LAYERS[name]
        model, seen = build(0), []
        dict(model.named_modules())[layer].register_forward_hook(lambda *a, seen=seen: seen.append(type(a[2])))
        ids = torch.ones(3, 7, dtype=torch.long)
        model(input_ids=ids, **({"decoder_input_ids": ids} if name == "t5" else {}))
        kinds |= set(seen)
    assert kinds == {tuple, Tensor}


@pytest.mark.parametrize("build", [ARCHITECTURES["llama"].build, bloom], ids=["tensor", "tuple"])
def test_g_04_every_row_counts(tmp_path, build) -> None:
    """With element 0 of a tensor taken for its first row, the other rows could be anything."""
    pattern = "transformer.h.1" if build is bloom else "model.layers.1"
    teacher, student, rows = build(0), build(1), list(Rows(3))
    valid = collate(rows)["attention_mask"] == 1

    def loss_of(selected) -> float:
        alignments = create_alignments(teacher, student, pattern, output_selector_index=0)
        distiller = HolisticDistiller(
            teacher,
            alignments,
            args=arguments(tmp_path, per_device_eval_batch_size=3),
            eval_dataset=selected,
            data_collator=collate,
        )
        return distiller.evaluate()["eval_loss"]

    inputs = {key: value for key, value in collate(rows).items() if key != "labels"}
    with torch.no_grad():
        own, wanted = (features(model.eval(), [pattern], inputs)[1][pattern] for model in (student, teacher))
    assert loss_of(rows) == pytest.approx(mean_square(own, wanted, valid).item(), rel=1e-5)
    changed = [rows[0], {**rows[1], "input_ids": rows[1]["input_ids"].flip(0).clamp(min=1)}, rows[2]]
    assert loss_of(changed) != pytest.approx(loss_of(rows), rel=1e-4)


def test_g_04_selectors_pick() -> None:
    assert select(A, None, "x") is A
    assert select(A, 0, "x") is A
    assert select((A, B), 0, "x") is A
    assert select([A, B], 1, "x") is B
    assert select((A, B), -1, "x") is B
    assert select({"first": A, "second": B}, "second", "x") is B
    assert select({"first": A, "second": B}, 1, "x") is B
    assert select(BaseModelOutput(last_hidden_state=A, hidden_states=(A, B)), "last_hidden_state", "x") is A
    assert select(BaseModelOutput(last_hidden_state=A, hidden_states=(A, B)), 0, "x") is A
    assert select(BaseModelOutput(hidden_states=(A, B)), lambda output: output.hidden_states[1], "x") is B


@pytest.mark.parametrize(
    ("value", "selector", "message"),
    [
        (A, 1, r"The selector 1 of module 'm' needs a tuple or mapping.*bare tensor of shape \[3, 5, 4\]"),
        (A, -1, "bare tensor"),
        (A, "hidden", "bare tensor"),
        ((A, B), 2, r"selector 2 of module 'm' is out of range: its output has 2 elements"),
        ((A, B), -3, "out of range"),
        ({"first": A}, 1, "out of range"),
        ({"first": A}, "second", r"'second' of module 'm' is not a key of its output \['first'\]"),
        ((A, B), None, r"module 'm' is a tuple of 2 elements, but its selector is None.*output_selector_index=0"),
        ({"first": A}, None, "selector is None"),
        ((A, B), "first", "a tuple of 2 elements"),
        ((A, None), 1, r"picked a NoneType, but a loss compares tensors"),
        ((A, (A, B)), 1, "picked a tuple"),
        ((A,), lambda output: output[0].tolist(), "picked a list"),
        (None, None, "a NoneType"),
        ("text", 0, "a str"),
    ],
)
def test_g_04_selectors_that_do_not_fit_are_refused(value, selector, message: str) -> None:
    with pytest.raises(AlignmentError, match=message):
        select(value, selector, "module 'm'")


def test_g_04_a_selector_that_does_not_fit_is_refused_before_training(tmp_path) -> None:
    teacher, student = ARCHITECTURES["llama"].pair()
    alignments = create_alignments(teacher, student, r"model\.layers\.\d+", output_selector_index=1)
    with pytest.raises(AlignmentError, match=r"selector 1 of module 'model\.layers\.0'"):
        HolisticDistiller(teacher, alignments, args=arguments(tmp_path), train_dataset=Rows(), data_collator=collate)


def test_g_04_a_tuple_without_a_selector_is_refused_before_training(tmp_path) -> None:
    teacher, student = bloom(0), bloom(1)
    alignments = create_alignments(teacher, student, r"transformer\.h\.\d+")
    with pytest.raises(AlignmentError, match=r"'transformer\.h\.0' is a tuple of \d elements.*output_selector_index=0"):
        HolisticDistiller(teacher, alignments, args=arguments(tmp_path), train_dataset=Rows(), data_collator=collate)


def test_logits_of_any_output() -> None:
    loss = torch.tensor(1.0)
    assert select_logits(A) is A
    assert select_logits({"logits": A, "loss": loss}) is A
    assert select_logits(CausalLMOutput(loss=loss, logits=B)) is B
    assert select_logits((A, B)) is A
    assert select_logits((loss, A)) is A
    assert select_logits({"scores": A}) is A
    assert select_logits({"scores": A, "loss": loss}) is A


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ({"a": A, "b": B}, r"\['a', 'b'\] and no 'logits'"),
        ({"loss": torch.tensor(1.0)}, "no 'logits'"),
        ((torch.tensor(1.0),), "returned a tuple, in which there are no logits"),
        (None, "a NoneType"),
    ],
)
def test_outputs_without_logits_are_refused(output, message: str) -> None:
    with pytest.raises(AlignmentError, match=message):
        select_logits(output)
