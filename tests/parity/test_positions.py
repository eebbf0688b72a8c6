"""What must not change the numbers, and what must: padding, empty rows, labels, counts, precision, recomputation."""

import dataclasses

import pytest
import torch

from parity.cases import ACCUMULATED, MOVED, ONE, PARITY_CASES, Collate, ParityRows, build_student, build_teacher
from parity.runs import build, identical, moved, relative, run, train
from silverspoon_kd.objectives import Counts
from support.reference import Recipe, distil

EXACT = 1e-6
BY_NAME = {case.name: case for case in PARITY_CASES}
THREE = ["response-task", "holistic-narrow-task", "blockwise-narrow-task"]
EVERY_LOSS = [*THREE, "response-mean_loss-task"]

PADDING = {
    "both sides, another token": Collate(left=4, right=3, padding_token=9),
    "empty rows": Collate(empty_rows=2),
}


def same(outcome, other, exact=EXACT):
    assert moved(other) > MOVED
    assert relative(outcome.after, other.after) < exact
    for left, right in zip(outcome.losses, other.losses, strict=True):
        assert left == pytest.approx(right, rel=2 * EXACT)


@pytest.mark.parametrize("name", THREE)
@pytest.mark.parametrize("padding", PADDING)
def test_padding_changes_nothing(name, padding, single, tmp_path):
    case = BY_NAME[name]
    same(run(case, ONE, tmp_path, collate=PADDING[padding]), single(case, ONE))


@pytest.mark.parametrize("name", THREE)
def test_padding_changes_nothing_under_accumulation(name, single, tmp_path):
    case = BY_NAME[name]
    same(run(case, ACCUMULATED, tmp_path, collate=Collate(right=3, empty_rows=1)), single(case, ONE))


@pytest.mark.parametrize("name", ["response-task", "response-mean_loss-task", "holistic", "blockwise-narrow-task"])
def test_last_window_of_an_epoch_is_shorter(name, tmp_path):
    case = dataclasses.replace(BY_NAME[name], steps=3)
    rows = ParityRows(10)
    one, accumulated = (run(case, layout, tmp_path, rows=rows) for layout in (ONE, ACCUMULATED))
    same(accumulated, one)


@pytest.mark.parametrize("magnitude_aware", [False, True])
@pytest.mark.parametrize("name", EVERY_LOSS)
def test_fully_masked_batch_is_zero_with_zero_gradients(name, magnitude_aware, tmp_path):
    distiller = build(BY_NAME[name], ONE, tmp_path, magnitude_aware_weighting=magnitude_aware)
    batch = Collate(right=6)([{"input_ids": [], "labels": []}] * 3)
    distiller.root.train()
    loss = distiller.compute_loss(distiller.root, batch)
    loss.backward()
    assert loss.item() == 0
    slopes = [each.grad for each in distiller.root.parameters() if each.grad is not None]
    assert slopes
    assert all(torch.count_nonzero(slope) == 0 for slope in slopes)


@pytest.mark.parametrize("name", EVERY_LOSS)
def test_training_on_fully_masked_batches_changes_nothing(name, tmp_path):
    case = dataclasses.replace(BY_NAME[name], steps=2)
    empty = [{"input_ids": [], "labels": []}] * 8
    outcome = run(case, ONE, tmp_path, rows=empty, collate=Collate(right=6))
    assert identical(outcome.after, outcome.before) == []
    assert [set(entry.values()) for entry in outcome.losses] == [{0.0}] * 2


def test_labels_left_on_padding_do_not_count(single, tmp_path):
    case = BY_NAME["response"]
    careless = Collate(left=4, right=3, padding_label=5)
    same(run(case, ONE, tmp_path, collate=careless), single(case, ONE))


def unlabelled(rows):
    return {key: value for key, value in Collate()(rows).items() if key != "labels"}


@pytest.mark.parametrize("name", ["holistic-narrow", "blockwise-narrow"])
def test_features_do_not_look_at_labels(name, single, tmp_path):
    case = BY_NAME[name]
    outcome = run(case, ONE, tmp_path, collate=unlabelled)
    assert identical(outcome.after, single(case, ONE).after) == []
    assert outcome.losses == single(case, ONE).losses


def test_logits_without_labels_are_compared_at_all_tokens(tmp_path):
    case = BY_NAME["response"]
    outcome = run(case, ONE, tmp_path, collate=unlabelled)
    # One label more than tokens: each token's logits count, those of the last one too.
    rows = [{**row, "labels": [0] * (len(row["input_ids"]) + 1)} for row in ParityRows(16).rows]
    steps = [rows[start : start + 4] for start in range(0, 16, 4)]
    recipe = Recipe(kind="response", learning_rate=case.learning_rate)
    result = distil(build_teacher(case), build_student(case), recipe, steps)
    after = {f"student.{name}": each.detach() for name, each in result.student.named_parameters()}
    assert moved(outcome) > MOVED
    assert relative(outcome.after, after) < EXACT
    assert [entry["loss"] for entry in outcome.losses] == pytest.approx([each["loss"] for each in result.losses], 2e-6)


@pytest.mark.parametrize("name", EVERY_LOSS)
def test_without_counts_a_batch_has_its_own_mean(name, tmp_path):
    distiller = build(BY_NAME[name], ONE, tmp_path)
    rows = ParityRows(6).rows
    left, right, whole = Collate()(rows[:3]), Collate()(rows[3:]), Collate()(rows)
    root = distiller.root.train()
    counts = distiller._get_num_items_in_batch([left, right], torch.device("cpu"))
    assert isinstance(counts, Counts)
    parts = [distiller.compute_loss(root, batch, num_items_in_batch=counts) for batch in (left, right)]
    alone = distiller.compute_loss(root, whole)
    assert sum(parts).item() == pytest.approx(alone.item(), rel=EXACT)
    assert distiller.compute_loss(root, left).item() > 1.2 * parts[0].item()


@pytest.mark.parametrize("name", THREE)
def test_recomputation_changes_nothing(name, single, tmp_path):
    case = BY_NAME[name]
    distiller = build(case, ONE, tmp_path, activation_checkpointing=True)
    outcome = train(distiller)
    assert all(layer.gradient_checkpointing for layer in distiller.student_model.model.layers)
    assert identical(outcome.after, single(case, ONE).after) == []
    assert outcome.losses == single(case, ONE).losses


@pytest.mark.parametrize("name", THREE)
def test_bf16_is_finite_and_close(name, single, tmp_path):
    case = BY_NAME[name]
    outcome, exact = run(case, ONE, tmp_path, bf16=True), single(case, ONE)
    assert {tensor.dtype for tensor in outcome.after.values()} == {torch.float32}
    assert all(torch.isfinite(tensor).all() for tensor in outcome.after.values())
    assert identical(outcome.after, exact.after) != []
    assert relative(outcome.after, exact.after) < 0.05 * moved(exact)
    for left, right in zip(outcome.losses, exact.losses, strict=True):
        assert left == pytest.approx(right, rel=0.02)
