"""Evaluation and prediction: what is reported, what is kept, and that training does not notice."""

import gc
import math

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch.nn import functional
from torch.utils.data import IterableDataset

from support.distil import KINDS, make, training_logs
from support.tiny import Rows, collate, qwen3, weights

LAYERS = [f"model.layers.{index}" for index in range(4)]


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


@torch.no_grad()
def layer_outputs(model, batch):
    """Outputs of the decoder layers and the logits, float64."""
    outputs, handles = [], []
    for layer in model.model.layers:
        handles.append(
            layer.register_forward_hook(
                lambda module, args, output: outputs.append(output[0] if isinstance(output, tuple) else output)
            )
        )
    modes = [module.training for module in model.modules()]
    model.eval()
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
    for module, mode in zip(model.modules(), modes, strict=True):
        module.training = mode
    for handle in handles:
        handle.remove()
    return [output.double() for output in outputs], logits.double()


def batches(rows, size):
    return [collate(rows.rows[start : start + size]) for start in range(0, len(rows), size)]


def by_rows(values, sizes):
    """The mean over batches as the Trainer takes it: each weighs by its rows."""
    return sum(value * size for value, size in zip(values, sizes, strict=True)) / sum(sizes)


def feature_losses(student, teacher, rows, size):
    """Each layer's mean squared error over the positions that are no padding, without projectors."""
    found = {name: [] for name in LAYERS}
    parts = batches(rows, size)
    for batch in parts:
        own, other = layer_outputs(student, batch)[0], layer_outputs(teacher, batch)[0]
        for name, left, right in zip(LAYERS, own, other, strict=True):
            positions = [(row, at) for row, at in batch["attention_mask"].nonzero().tolist()]
            found[name].append(sum(float(((left[p] - right[p]) ** 2).mean()) for p in positions) / len(positions))
    sizes = [len(batch["input_ids"]) for batch in parts]
    return {name: by_rows(values, sizes) for name, values in found.items()}


def own_loss(student, rows, size):
    """The student's own cross entropy."""
    values = []
    for batch in batches(rows, size):
        logits = layer_outputs(student, batch)[1][:, :-1].flatten(0, 1)
        values.append(float(functional.cross_entropy(logits, batch["labels"][:, 1:].flatten(), ignore_index=-100)))
    return by_rows(values, [len(batch["input_ids"]) for batch in batches(rows, size)])


@pytest.mark.parametrize("labels", [True, False])
def test_i_07_loss_and_terms_equal_a_direct_computation(tmp_path, labels):
    """Ten rows in batches of four, before any training."""
    rows, teacher, student = Rows(n=10, seed=3, labels=labels), qwen3(0), qwen3(1)
    given = {"eval_dataset": rows}
    distiller = make("holistic", tmp_path, teacher=teacher, student=student, given=given, per_device_eval_batch_size=4)
    metrics = distiller.evaluate()
    wanted = feature_losses(student, teacher, rows, 4)
    for name in LAYERS:
        assert metrics[f"eval_loss/{name}"] == pytest.approx(wanted[name], rel=1e-5)
    assert metrics["eval_loss"] == pytest.approx(sum(wanted.values()), rel=1e-5)
    assert "eval_task_loss" not in metrics


@pytest.mark.parametrize("kind", KINDS)
def test_i_07_no_labels(tmp_path, kind):
    given = {"train_dataset": Rows(labels=False), "eval_dataset": Rows(n=6, labels=False)}
    distiller = make(kind, tmp_path, given=given, eval_strategy="steps", eval_steps=2)
    distiller.train()
    losses = [entry["eval_loss"] for entry in distiller.state.log_history if "eval_loss" in entry]
    assert len(losses) == 2 and all(math.isfinite(loss) for loss in losses)
    assert losses[1] < losses[0]


def test_end_to_end_loss_is_the_students_own(tmp_path):
    """Blockwise: the terms see the teacher's inputs, the end-to-end loss does not."""
    rows, student = Rows(n=10, seed=3), qwen3(1)
    distiller = make(
        "blockwise",
        tmp_path,
        student=student,
        given={"eval_dataset": rows},
        e2e_eval_loss="forward",
        per_device_eval_batch_size=4,
        learning_rate=1.0,
        eval_strategy="steps",
        eval_steps=4,
    )
    assert distiller.evaluate()["eval_end_to_end_loss"] == pytest.approx(own_loss(student, rows, 4), rel=1e-5)
    distiller.train()
    entry = next(entry for entry in distiller.state.log_history if entry.get("step") == 4 and "eval_loss" in entry)
    assert entry["eval_end_to_end_loss"] == pytest.approx(own_loss(student, rows, 4), rel=1e-5)
    assert all("loss/end_to_end" not in entry for entry in training_logs(distiller))


@pytest.mark.parametrize("kind", KINDS)
def test_alpha_in_evaluation(tmp_path, kind):
    rows, student = Rows(n=8, seed=3), qwen3(1)
    distiller = make(kind, tmp_path, student=student, given={"eval_dataset": rows}, alpha=0.25)
    metrics = distiller.evaluate()
    terms = sum(value for key, value in metrics.items() if key.startswith("eval_loss/"))
    assert metrics["eval_loss"] == pytest.approx(0.75 * terms + 0.25 * metrics["eval_task_loss"], rel=1e-5)
    if kind != "blockwise":
        assert metrics["eval_task_loss"] == pytest.approx(own_loss(student, rows, 8), rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_i_08_predictions_are_the_students_own_logits(tmp_path, kind):
    rows, student, seen = Rows(n=6, seed=3), qwen3(1), []

    def metrics(prediction):
        seen.append(prediction)
        return {"correct": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    given = {"eval_dataset": rows, "compute_metrics": metrics}
    distiller = make(kind, tmp_path, student=student, given=given, alpha=0.5, per_device_eval_batch_size=4)
    result = distiller.evaluate()
    assert 0 <= result["eval_correct"] <= 1
    logits = torch.cat([layer_outputs(student, batch)[1] for batch in batches(rows, 4)])
    assert isinstance(seen[0].predictions, np.ndarray) and seen[0].predictions.shape == (6, 12, 64)
    np.testing.assert_allclose(seen[0].predictions, logits.numpy(), atol=1e-5)
    np.testing.assert_array_equal(seen[0].label_ids, torch.stack([row["labels"] for row in rows.rows]).numpy())


@pytest.mark.parametrize("kind", KINDS)
def test_predict_without_metrics(tmp_path, kind):
    rows, student = Rows(n=6, seed=3, labels=False), qwen3(1)
    output = make(kind, tmp_path, student=student).predict(rows)
    logits = torch.cat([layer_outputs(student, batch)[1] for batch in batches(rows, 6)])
    np.testing.assert_allclose(output.predictions, logits.numpy(), atol=1e-5)
    assert math.isfinite(output.metrics["test_loss"])
    assert any(key.startswith("test_loss/") for key in output.metrics)


def test_predict_of_images(tmp_path):
    """A student without labels, tokens or a lm_head."""

    def vit(seed, hidden):
        torch.manual_seed(seed)
        config = transformers.ViTConfig(
            hidden_size=hidden, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, image_size=8,
            patch_size=4, num_labels=3,
        )  # fmt: skip
        return transformers.ViTForImageClassification(config)

    teacher, student = vit(0, 16), vit(1, 8)
    rows = [{"pixel_values": torch.randn(3, 8, 8), "labels": torch.tensor(index % 3)} for index in range(6)]
    given = {"train_dataset": rows, "eval_dataset": rows}
    distiller = make("response", tmp_path, teacher=teacher, student=student, given=given, alpha=0.5)
    distiller.train()
    output = distiller.predict(rows)
    assert output.predictions.shape == (6, 3) and output.label_ids.tolist() == [0, 1, 2, 0, 1, 2]
    student.eval()
    with torch.no_grad():
        wanted = student(pixel_values=torch.stack([row["pixel_values"] for row in rows])).logits
    np.testing.assert_allclose(output.predictions, wanted.numpy(), atol=1e-6)


class Watch(transformers.TrainerCallback):
    """How many tensors are alive at some prediction steps."""

    def __init__(self, at):
        self.at, self.step, self.alive = at, 0, []

    def on_prediction_step(self, args, state, control, **kwargs):
        self.step += 1
        if self.step in self.at:
            gc.collect()
            self.alive.append(sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()))


def test_i_08_nothing_is_kept(tmp_path):
    teacher, student, grad = qwen3(0), qwen3(1, hidden=16), []
    teacher.register_forward_pre_hook(lambda module, args: grad.append(torch.is_grad_enabled()))
    watch = Watch((10, 50))
    given = {"eval_dataset": Rows(n=50), "callbacks": [watch]}
    changes = {"per_device_eval_batch_size": 1}
    distiller = make("holistic", tmp_path, teacher=teacher, student=student, given=given, **changes)
    grad.clear()
    output = distiller.evaluation_loop(distiller.get_eval_dataloader(), "x", prediction_loss_only=True)
    assert output.predictions is None and output.label_ids is None
    assert len(grad) == 50 and not any(grad)
    # Only the loss of each batch is kept, as one array.
    assert watch.alive[1] - watch.alive[0] <= 2


def test_i_08_training_does_not_notice_evaluation(tmp_path):
    """Weights and order of the rows stay what they were, and each training forward is in training mode."""

    def run(folder, **changes):
        student, modes = qwen3(1, hidden=16), []
        student.register_forward_pre_hook(lambda module, args: modes.append(module.training))
        given = {"eval_dataset": Rows(n=6, seed=9)}
        distiller = make("holistic", folder, student=student, given=given, max_steps=4, **changes)
        modes.clear()
        distiller.train()
        return distiller, modes

    plain, modes = run(tmp_path / "a")
    assert modes == [True] * 4
    evaluated, modes = run(
        tmp_path / "b", eval_strategy="steps", eval_steps=1, eval_on_start=True, gradient_accumulation_steps=1
    )
    assert modes == [False, True] * 4 + [False]
    own, other = weights(plain.root), weights(evaluated.root)
    assert all(torch.equal(own[name], other[name]) for name in own)
    assert [entry["loss"] for entry in training_logs(plain)] == [entry["loss"] for entry in training_logs(evaluated)]
    evaluated.train()
    assert evaluated.evaluate()["eval_loss"] > 0


def test_i_11_lora_student_has_labels_and_a_loss(tmp_path):
    student = get_peft_model(qwen3(1, hidden=16), LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
    seen = []
    given = {"eval_dataset": Rows(n=6), "compute_metrics": lambda prediction: seen.append(prediction) or {}}
    distiller = make("response", tmp_path, student=student, given=given, alpha=0.5)
    assert distiller.label_names == ["labels"]
    assert math.isfinite(distiller.evaluate()["eval_loss"])
    assert seen[0].label_ids.shape == (6, 12)
    distiller.train()
    assert math.isfinite(distiller.evaluate()["eval_task_loss"])


def test_i_11_label_names_given_by_the_user(tmp_path):
    distiller = make("response", tmp_path, given={"eval_dataset": Rows(n=6)}, label_names=["labels", "input_ids"])
    assert distiller.label_names == ["labels", "input_ids"]
    output = distiller.predict(Rows(n=6))
    assert [each.shape for each in output.label_ids] == [(6, 12), (6, 12)]


def test_several_data_sets(tmp_path):
    one, other = Rows(n=6, seed=3), Rows(n=4, seed=4)
    distiller = make("holistic", tmp_path, given={"eval_dataset": {"one": one, "other": other}})
    metrics = distiller.evaluate()
    for name, rows in (("one", one), ("other", other)):
        alone = distiller.evaluate(rows)
        assert metrics[f"eval_{name}_loss"] == alone["eval_loss"]
        assert metrics[f"eval_{name}_loss/model.layers.2"] == alone["eval_loss/model.layers.2"]


@pytest.mark.parametrize("kind", KINDS)
def test_streams(tmp_path, kind):
    """Training and evaluation from data without a length equal those from the same rows by index."""
    rows, rest = Rows(n=16), Rows(n=7, seed=3)

    def run(folder, train, evaluation, **changes):
        distiller = make(kind, folder, given={"train_dataset": train, "eval_dataset": evaluation}, **changes)
        distiller.train()
        return distiller, distiller.evaluate()

    streamed, metrics = run(tmp_path / "a", Stream(rows.rows), Stream(rest.rows), per_device_eval_batch_size=4)
    listed, wanted = run(tmp_path / "b", rows, rest, per_device_eval_batch_size=4, train_sampling_strategy="sequential")
    own, other = weights(streamed.root), weights(listed.root)
    assert all(torch.equal(own[name], other[name]) for name in own)
    assert {key: value for key, value in metrics.items() if "loss" in key} == {
        key: value for key, value in wanted.items() if "loss" in key
    }


def test_evaluation_without_training_data(tmp_path):
    distiller = make("response", tmp_path, given={"train_dataset": None, "eval_dataset": Rows(n=6)})
    assert math.isfinite(distiller.evaluate()["eval_loss"])
    assert len(distiller.predict(Rows(n=3)).predictions) == 3
