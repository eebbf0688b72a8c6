"""Aligned output heads without logits, beside other alignments: the numbers of the dense way."""

import pytest

from silverspoon_kd import BlockwiseDistiller, HolisticDistiller, create_alignments, errors
from silverspoon_kd.training.fused import FUSED
from support.distil import training_logs
from support.tiny import Rows, arguments, collate, distance, qwen3, weights
from unit.training.test_fused_losses import PAIRS, WIDE, Largest

LAYER, HEAD = r"(model\.layers|transformer\.h)\.1", "lm_head"


def build(
    folder,
    models,
    *,
    loss="kl_divergence",
    options=None,
    make=HolisticDistiller,
    head=HEAD,
    rows=None,
    given=None,
    **changes,
):
    teacher, student = models
    layers = create_alignments(teacher, student, LAYER, output_selector_index=0, loss_weight=0.5)
    heads = create_alignments(
        teacher,
        student,
        head,
        loss_function=loss,
        loss_function_kwargs=options,
        output_selector_index=0,
        loss_weight=2.0,
    )
    return make(
        teacher,
        layers + heads,
        args=arguments(folder, **{"max_steps": 3, "learning_rate": 0.2, "report_to": "none", **changes}),
        train_dataset=Rows(32) if rows is None else rows,
        eval_dataset=Rows(7, seed=5),
        data_collator=collate,
        **(given or {}),
    )


def outcome(distiller):
    before = weights(distiller.root)
    distiller.train()
    assert distance(weights(distiller.root), before) > 1e-3
    logs = [
        {key: entry[key] for key in entry if key.startswith(("loss", "grad_norm"))}
        for entry in training_logs(distiller)
    ]
    return weights(distiller.root), [*logs, {k: v for k, v in distiller.evaluate().items() if "loss" in k}]


def same(folder, make, **changes):
    fused, dense = build(folder, make(), **changes), build(folder, make(), fused_losses=False, **changes)
    assert fused.plan.logits == FUSED and dense.plan.logits == "whole (fused_losses=False)"
    (ours, numbers), (theirs, expected) = outcome(fused), outcome(dense)
    assert distance(ours, theirs) < 1e-6
    for one, other in zip(numbers, expected, strict=True):
        assert one == pytest.approx(other, rel=2e-6)


@pytest.mark.parametrize("pair", ["qwen3", "tied", "padded teacher", "gpt2", "gemma2", "granite"])
def test_every_head_gives_the_numbers_of_the_dense_way(pair, tmp_path):
    same(tmp_path, PAIRS[pair])


@pytest.mark.parametrize(
    "changes",
    [
        {"alpha": 0.4},
        {"alpha": 0.4, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
        {"magnitude_aware_weighting": True},
        {"gradient_checkpointing": True, "alpha": 0.4},
        {"loss": "jsd", "max_grad_norm": 0.1},
    ],
    ids=str,
)
def test_every_way_to_train_gives_the_numbers_of_the_dense_way(changes, tmp_path):
    same(tmp_path, PAIRS["qwen3"], **changes)


def test_predictions_are_those_of_the_dense_way(tmp_path):
    metrics = []
    for fused in (None, False):
        given = {"compute_metrics": lambda found: {"mean": float(abs(found.predictions[0]).mean())}}
        distiller = build(tmp_path, PAIRS["qwen3"](), given=given, fused_losses=fused)
        assert (distiller.plan.logits == FUSED) is (fused is None)
        distiller.train()
        metrics.append({k: v for k, v in distiller.evaluate().items() if "loss" in k or "mean" in k})
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-5) and metrics[0]["eval_mean"] > 0


@pytest.mark.parametrize("fused", [None, False])
def test_no_tensor_of_tokens_and_vocabulary_is_made(fused, tmp_path):
    vocabulary = 997
    models = qwen3(1, vocab=vocabulary), qwen3(2, vocab=vocabulary)
    teacher_head = []
    options = {"chunk_size": 5}
    distiller = build(tmp_path, models, loss="reverse_kl", options=options, fused_losses=fused, rows=Rows(32, low=12))
    models[0].lm_head.register_forward_hook(lambda *_: teacher_head.append(1))
    with Largest(4 * 12) as seen:
        distiller.train()
    assert (seen.found >= vocabulary) is (fused is False)
    assert bool(teacher_head) is (fused is False)


@pytest.mark.parametrize(
    ("changes", "pair", "reason"),
    [
        ({"loss": "mse"}, "qwen3", "mse is not kl_divergence, reverse_kl or jsd"),
        ({"alpha": 0.5}, "gemma2", "alpha > 0: the aligned head's output is scaled or capped before"),
        ({"head": {"model.norm": HEAD}}, "tied", "teacher: 'model.norm' is not its output head"),
        ({"make": BlockwiseDistiller}, "qwen3", "blockwise learns from what modules take in"),
    ],
    ids=str,
)
def test_where_it_cannot_be_logits_are_made_and_true_is_refused(changes, pair, reason, tmp_path):
    models = PAIRS[pair]()
    if "head" in changes:  # compares a vector of the hidden size with one of as many tokens
        models = models[0], qwen3(2, layers=2, vocab=32, **WIDE)
        changes = {**changes, "rows": Rows(32, vocab=32)}
    distiller = build(tmp_path, models, **changes)
    assert distiller.plan.logits.startswith(f"whole ({reason}")
    distiller.train()
    with pytest.raises(errors.ConfigurationError, match="fused_losses=True cannot be"):
        build(tmp_path, PAIRS[pair](), **{**changes, "fused_losses": True})


def test_two_losses_on_one_head_keep_the_logits(tmp_path):
    teacher, student = PAIRS["qwen3"]()
    alignments = create_alignments(teacher, student, HEAD, loss_function="kl_divergence")
    alignments = alignments + create_alignments(teacher, student, HEAD, loss_function="reverse_kl")
    args = arguments(tmp_path, report_to="none")
    distiller = HolisticDistiller(teacher, alignments, args=args, train_dataset=Rows(8), data_collator=collate)
    assert distiller.plan.logits == "whole (there are several losses on the output of a head)"
    distiller.train()


def test_without_a_loss_on_logits_the_plan_says_nothing_of_them(tmp_path):
    teacher, student = PAIRS["qwen3"]()
    alignments = create_alignments(teacher, student, LAYER, output_selector_index=0)
    args = arguments(tmp_path, report_to="none")
    distiller = HolisticDistiller(teacher, alignments, args=args, train_dataset=Rows(8), data_collator=collate)
    assert distiller.plan.logits == "" and "logits" not in distiller.plan.table()


def test_a_head_alone_is_trained_without_logits(tmp_path):
    found = []
    for fused in (None, False):
        teacher, student = PAIRS["qwen3"]()
        alignments = create_alignments(teacher, student, HEAD, loss_function="kl_divergence")
        args = arguments(tmp_path, report_to="none", alpha=0.3, fused_losses=fused)
        given = {"train_dataset": Rows(32), "eval_dataset": Rows(4), "data_collator": collate}
        distiller = HolisticDistiller(teacher, alignments, args=args, **given)
        assert (distiller.plan.logits == FUSED) is (fused is None)
        found.append(outcome(distiller))
    assert distance(found[0][0], found[1][0]) < 1e-6
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert one == pytest.approx(other, rel=2e-6)
