"""Losses on logits without logits: the numbers of the dense way, and no tensor of tokens x vocabulary."""

import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from silverspoon_kd import HolisticDistiller, ResponseBasedDistiller, create_alignments, errors
from silverspoon_kd.training.fused import FUSED
from silverspoon_kd.tree import tensors_in
from support.tiny import Rows, arguments, collate, distance, llama, qwen3, weights

WIDE = {"initializer_range": 0.1}
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
    **WIDE,
}


def made(name, seed, **changes):
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **changes})
    return getattr(transformers, f"{name}ForCausalLM")(config)


def gpt2(seed):
    torch.manual_seed(seed)
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1)
    config.initializer_range, config.eos_token_id = 0.1, 2
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return transformers.GPT2LMHeadModel(config)


# Teacher and student.
PAIRS = {
    "qwen3": lambda: (qwen3(1, layers=3, **WIDE), qwen3(2, layers=2, hidden=24, **WIDE)),
    "tied": lambda: (qwen3(1, **WIDE), qwen3(2, layers=2, tie_word_embeddings=True, **WIDE)),
    "tied teacher": lambda: (llama(1, tie_word_embeddings=True, **WIDE), llama(2, layers=2, **WIDE)),
    "padded teacher": lambda: (qwen3(1, vocab=80, **WIDE), qwen3(2, layers=2, **WIDE)),
    "padded student": lambda: (qwen3(1, **WIDE), qwen3(2, layers=2, vocab=80, **WIDE)),
    "gpt2": lambda: (gpt2(1), gpt2(2)),
    "gemma2": lambda: (
        made("Gemma2", 1, head_dim=8, final_logit_softcapping=2.0),
        made("Gemma2", 2, head_dim=8, final_logit_softcapping=2.0),
    ),
    "granite": lambda: (made("Granite", 1, logits_scaling=0.5), made("Granite", 2, logits_scaling=2.0)),
    "cohere": lambda: (made("Cohere", 1, logit_scale=2.0), made("Cohere", 2, logit_scale=0.5)),
}
LOSSES = {
    "kl": ("kl_divergence", {}),
    "warm kl": ("kl_divergence", {"temperature": 3.0}),
    "reverse": ("reverse_kl", {"temperature": 0.5, "chunk_size": 5}),
    "jsd": ("jsd", {"beta": 0.3, "temperature": 2.0}),
    "jsd as kl": ("jsd", {"beta": 0.0}),
}


def build(folder, models, loss="kl", *, rows=None, compute_metrics=None, prepare=None, **changes):
    teacher, student = models
    name, options = LOSSES[loss]
    return ResponseBasedDistiller(
        student,
        teacher,
        soft_loss_fn=name,
        soft_loss_fn_kwargs=options,
        args=arguments(folder, **{"max_steps": 3, "learning_rate": 0.5, "report_to": "none", **changes}),
        train_dataset=Rows(32) if rows is None else rows,
        eval_dataset=Rows(7, seed=5),
        data_collator=collate,
        compute_metrics=compute_metrics,
        prepare_teacher_inputs=prepare,
    )


def train(folder, models, loss="kl", **changes):
    distiller = build(folder, models, loss, **changes)
    before = weights(distiller.root)
    distiller.train()
    logs = [entry for entry in distiller.state.log_history if "loss" in entry]
    names = [name for name in logs[0] if name.startswith("loss")] + ["grad_norm"]
    assert ("loss/task" in names) is (changes.get("alpha", 0) > 0)
    numbers = [{name: entry[name] for name in names} for entry in logs]
    after = weights(distiller.root)
    assert distance(after, before) > 1e-3
    metrics = {name: value for name, value in distiller.evaluate().items() if "loss" in name}
    return distiller, after, [*numbers, {"loss": metrics["eval_loss"], **metrics}]


def same(folder, make, loss="kl", rel=1e-6, **changes):
    fused, ours, numbers = train(folder, make(), loss, **changes)
    dense, theirs, expected = train(folder, make(), loss, fused_losses=False, **changes)
    assert fused.plan.logits == FUSED and dense.plan.logits == "whole (fused_losses=False)"
    assert distance(ours, theirs) < rel
    assert [each["loss"] for each in numbers] == pytest.approx([each["loss"] for each in expected], rel=rel)
    for one, other in zip(numbers, expected, strict=True):
        assert one == pytest.approx(other, rel=2 * rel)
    return fused


@pytest.mark.parametrize("pair", PAIRS)
def test_every_head_gives_the_numbers_of_the_dense_way(pair, tmp_path):
    same(tmp_path, PAIRS[pair], "warm kl")


@pytest.mark.parametrize("loss", LOSSES)
def test_every_divergence_gives_the_numbers_of_the_dense_way(loss, tmp_path):
    same(tmp_path, PAIRS["qwen3"], loss)


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_accumulation_steps": 2},
        {"magnitude_aware_weighting": True},
        {"activation_checkpointing": True},
        {"e2e_eval_loss": "forward"},
        {"overlap_teacher_forward": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_every_way_to_train_gives_the_numbers_of_the_dense_way(changes, tmp_path):
    same(tmp_path, PAIRS["qwen3"], **changes)


@pytest.mark.parametrize("pair", ["qwen3", "gemma2"])
def test_mixed_precision_is_as_close_as_its_rounding(pair, tmp_path):
    same(tmp_path, PAIRS[pair], bf16=True, rel=2e-3)


def test_rows_without_labels_count_all_tokens(tmp_path):
    same(tmp_path, PAIRS["qwen3"], rows=Rows(32, labels=False))


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_predictions_are_those_of_the_dense_way(alpha, tmp_path):
    def metrics(prediction):
        return {"mean": float(prediction.predictions.mean()), "shape": list(prediction.predictions.shape)}

    found = []
    for fused in (None, False):
        distiller = build(tmp_path, PAIRS["qwen3"](), compute_metrics=metrics, fused_losses=fused, alpha=alpha)
        runs = []
        distiller.student_model.lm_head.register_forward_hook(lambda *given, runs=runs: runs.append(given[0]))
        found.append(distiller.evaluate())
        assert len(runs) == 1  # nothing runs twice for the sake of the metrics
    for key in ("eval_loss", "eval_loss/logits", "eval_mean", "eval_shape"):
        assert found[0][key] == pytest.approx(found[1][key], rel=1e-6)


def test_labels_of_no_position_give_a_loss_of_zero(tmp_path):
    rows = Rows(12)
    for row in rows.rows:
        row["labels"][:] = -100
    distiller = build(tmp_path, PAIRS["qwen3"](), rows=rows)
    before = weights(distiller.root)
    distiller.train()
    assert distiller.state.log_history[0]["loss"] == 0
    assert distance(weights(distiller.root), before) == 0


class Largest(TorchDispatchMode):
    """Note the largest tensor that has a row for every token."""

    def __init__(self, tokens):
        super().__init__()
        self.tokens, self.found = tokens, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            if tensor.device.type != "meta" and tensor.numel() % self.tokens == 0:
                self.found = max(self.found, tensor.numel() // self.tokens)
        return result


@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("fused", [None, False])
def test_no_tensor_of_tokens_and_vocabulary_is_made(fused, alpha, tmp_path):
    vocabulary, tokens = 997, 4 * 12
    models = qwen3(1, vocab=vocabulary), qwen3(2, vocab=vocabulary)
    distiller = build(tmp_path, models, "reverse", fused_losses=fused, alpha=alpha, rows=Rows(32, low=12))
    with Largest(tokens) as seen:
        distiller.train()
        distiller.evaluate()
    # Each position has a vector of the hidden size at least.
    assert seen.found >= 32
    assert (seen.found >= vocabulary) is (fused is False)


def test_the_teachers_head_does_not_run_and_the_students_makes_no_logits(tmp_path):
    teacher, student = PAIRS["qwen3"]()
    distiller = build(tmp_path, (teacher, student))
    shapes = []
    student.lm_head.register_forward_hook(lambda module, args, output: shapes.append(output.shape))
    teacher.lm_head.register_forward_hook(lambda *given: pytest.fail("the teacher's head ran"))
    distiller.train()
    assert shapes == [(1, 1, 1)] * 3
    assert "forward" not in vars(student.lm_head)


def test_the_head_gets_its_forward_back_after_an_error(tmp_path):
    teacher, student = PAIRS["qwen3"]()
    distiller = build(tmp_path, (teacher, student), prepare=lambda batch: {"input_ids": batch["input_ids"][:, :-1]})
    with pytest.raises(errors.LossError, match=r"Alignment 'logits': kl_divergence: .* differ in shape"):
        distiller.train()
    assert "forward" not in vars(student.lm_head)


@pytest.mark.parametrize("pair", PAIRS)
def test_the_students_own_loss_is_computed_in_the_same_pass(pair, tmp_path):
    same(tmp_path, PAIRS[pair], "warm kl", alpha=0.3)


@pytest.mark.parametrize("loss", LOSSES)
def test_every_divergence_goes_with_the_students_own_loss(loss, tmp_path):
    same(tmp_path, PAIRS["padded student"], loss, alpha=0.7)


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_accumulation_steps": 2},
        {"alpha": 1.0},
        {"e2e_eval_loss": "forward"},
        {"bf16": True, "rel": 2e-3},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_every_way_to_train_goes_with_the_students_own_loss(changes, tmp_path):
    same(tmp_path, PAIRS["qwen3"], **{"alpha": 0.4, **changes})


def shared(folder, loss="kl_divergence", **changes):
    teacher, student = PAIRS["qwen3"]()
    args = arguments(folder, report_to="none", max_steps=1, **changes)
    return ResponseBasedDistiller(
        student, teacher, soft_loss_fn=loss, args=args, train_dataset=Rows(8), data_collator=collate
    )


def distant(student, teacher):
    return (student - teacher).abs().mean()


@pytest.mark.parametrize(
    ("loss", "changes", "reason"),
    [
        ("kl_divergence", {"alpha": 0.5, "label_smoothing_factor": 0.1}, "alpha > 0 with magnitude_aware_weighting or"),
        ("kl_divergence", {"alpha": 0.5, "magnitude_aware_weighting": True}, "alpha > 0 with magnitude_aware"),
        ("mse", {}, "mse is not kl_divergence, reverse_kl or jsd"),
        (distant, {}, "is not kl_divergence, reverse_kl or jsd"),
    ],
)
def test_where_it_cannot_be_logits_are_made_and_true_is_refused(loss, changes, reason, tmp_path):
    assert reason in shared(tmp_path, loss, **changes).plan.logits
    with pytest.raises(errors.ConfigurationError, match=f"fused_losses=True cannot be: .*{reason}"):
        shared(tmp_path, loss, fused_losses=True, **changes)


@pytest.mark.parametrize("side", ["teacher", "student"])
def test_an_unusual_head_keeps_its_logits(side, tmp_path):
    teacher, student = PAIRS["qwen3"]()
    head = {"teacher": teacher, "student": student}[side].lm_head
    head.register_forward_hook(lambda module, args, output: output * 1.5)
    distiller = build(tmp_path, (teacher, student))
    assert distiller.plan.logits == f"whole ({side}: the output head has hooks)"
    distiller.train()
    with pytest.raises(errors.ConfigurationError, match=f"{side}: the output head has hooks"):
        build(tmp_path, (teacher, student), fused_losses=True)


def test_true_is_refused_where_no_loss_is_on_logits(tmp_path):
    teacher, student = PAIRS["qwen3"]()
    alignments = create_alignments(teacher, student, r"model\.layers\.1", output_selector_index=0)
    args = arguments(tmp_path, fused_losses=True)
    with pytest.raises(errors.ConfigurationError, match="no loss is on logits"):
        HolisticDistiller(teacher, alignments, args=args, train_dataset=Rows(8), data_collator=collate)


def test_only_none_true_and_false_are_choices(tmp_path):
    with pytest.raises(errors.ConfigurationError, match="fused_losses='yes' is not a choice"):
        arguments(tmp_path, fused_losses="yes")


def lora(targets, **changes):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    base = qwen3(2, layers=2, **WIDE)
    return base, get_peft_model(base, LoraConfig(target_modules=targets, init_lora_weights=False, **changes))


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["q_proj", "lm_head"], ["lm_head"]], ids=str)
def test_adapters_are_trained_without_logits(tmp_path, targets):
    same(tmp_path, lambda: (qwen3(1, **WIDE), lora(targets)[1]))


def test_adapters_on_a_head_in_half_precision_are_as_close_as_its_rounding(tmp_path):
    def models():
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(3)
        base = qwen3(2, layers=2, **WIDE).bfloat16()
        return qwen3(1, **WIDE).bfloat16(), get_peft_model(
            base, LoraConfig(target_modules=["lm_head"], init_lora_weights=False)
        )

    same(tmp_path, models, rel=5e-3)


@pytest.mark.parametrize("changes", [{"lora_dropout": 0.1}, {"use_dora": True}], ids=str)
def test_adapters_that_add_no_matrix_to_the_head_keep_the_logits(tmp_path, changes):
    distiller = build(tmp_path, (qwen3(1, **WIDE), lora(["q_proj", "lm_head"], **changes)[1]))
    reason = "the output head has adapters that do more than add a matrix, such as dropout"
    assert distiller.plan.logits == f"whole (student: {reason})"
    before = weights(distiller.root)
    distiller.train()
    assert distance(weights(distiller.root), before) > 1e-3


def test_an_own_base_with_adapters_on_the_head_keeps_the_logits(tmp_path):
    distiller = build(tmp_path, lora(["q_proj", "lm_head"]))
    assert distiller.plan.logits.startswith("whole (teacher: the output head is a Linear and not an ordinary")
    distiller.train()


def test_the_own_base_as_the_teacher_is_used_without_logits(tmp_path):
    same(tmp_path, lambda: lora(["q_proj", "v_proj"]))


def test_a_plain_module_with_a_head_is_trained_without_logits(tmp_path):
    class Plain(nn.Module):
        def __init__(self, seed):
            super().__init__()
            torch.manual_seed(seed)
            self.embed, self.lm_head = nn.Embedding(64, 16), nn.Linear(16, 64)

        def get_output_embeddings(self):
            return self.lm_head

        def forward(self, input_ids):
            return {"logits": self.lm_head(self.embed(input_ids))}

    same(tmp_path, lambda: (Plain(1), Plain(2)))
