"""Which positions a whole run's losses count: padding, labels, vocabularies, label smoothing."""

import pytest
import torch
import transformers
from torch.nn import functional

from silverspoon_kd.errors import ConfigurationError
from support.distil import KINDS, make, training_logs
from support.tiny import Rows, collate, llama, qwen3, weights


def kl_by_hand(student, teacher, batch, positions, vocabulary=None):
    """The mean of sum p_t (log p_t - log p_s) over some positions, float64."""
    values = []
    with torch.no_grad():
        own = student(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.double()
        other = teacher(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.double()
    for row, at in positions:
        log_p = other[row, at, :vocabulary].log_softmax(-1)
        values.append(float((log_p.exp() * (log_p - own[row, at, :vocabulary].log_softmax(-1))).sum()))
    return sum(values) / len(values)


def first_loss(kind, folder, student, teacher, rows, **changes):
    """The loss of the first batch of four rows, logged in training with rate 0."""
    values = {"learning_rate": 0.0, "max_steps": 1, "train_sampling_strategy": "sequential", **changes}
    distiller = make(kind, folder, student=student, teacher=teacher, given={"train_dataset": rows}, **values)
    distiller.train()
    return training_logs(distiller)[0]


def two_lengths(pad_to, prompt=3):
    """Rows of 4 and 8 tokens; the labels of the prompt are -100."""
    numbers = torch.Generator().manual_seed(5)
    rows = []
    for index in range(4):
        length = 4 if index % 2 else 8
        ids = torch.randint(1, 64, (length,), generator=numbers)
        blank = torch.zeros(pad_to - length, dtype=torch.long)
        labels = ids.clone()
        labels[:prompt] = -100
        rows.append(
            {
                "input_ids": torch.cat([ids, blank]),
                "attention_mask": torch.cat([torch.ones(length, dtype=torch.long), blank]),
                "labels": torch.cat([labels, blank - 100]),
            }
        )
    return rows


@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("kind", KINDS)
def test_h_04_padding_does_not_count(tmp_path, kind, alpha):
    entries = []
    for pad_to in (8, 16):
        student, teacher = qwen3(1, hidden=16), qwen3(0)
        entries.append(first_loss(kind, tmp_path, student, teacher, two_lengths(pad_to), alpha=alpha))
    assert set(entries[0]) == set(entries[1])
    for key in entries[0]:
        assert entries[1][key] == pytest.approx(entries[0][key], rel=1e-5), key


def test_h_04_positions_that_predict_a_label_count(tmp_path):
    """The logits at t belong to the label at t + 1; -100 does not count."""
    student, teacher, rows = qwen3(1), qwen3(0), two_lengths(8)
    batch = collate(rows)
    positions = [(row, at) for row in range(4) for at in range(7) if batch["labels"][row, at + 1] != -100]
    assert len(positions) == 2 * 5 + 2 * 1
    entry = first_loss("response", tmp_path, student, teacher, rows)
    assert entry["loss"] == pytest.approx(kl_by_hand(student, teacher, batch, positions), rel=1e-5)


def test_h_04_all_positions_count_without_labels(tmp_path):
    student, teacher = qwen3(1), qwen3(0)
    rows = [{name: value for name, value in row.items() if name != "labels"} for row in two_lengths(8)]
    batch = collate(rows)
    positions = [tuple(each) for each in batch["attention_mask"].nonzero().tolist()]
    entry = first_loss("response", tmp_path, student, teacher, rows)
    assert entry["loss"] == pytest.approx(kl_by_hand(student, teacher, batch, positions), rel=1e-5)


def test_h_02_independent_of_the_length(tmp_path):
    """One token again and again, without positions: the same distribution everywhere."""
    losses = []
    for length in (8, 16):
        row = {"input_ids": torch.full((length,), 7), "attention_mask": torch.ones(length, dtype=torch.long)}
        student, teacher = qwen3(1), qwen3(0)
        for model in (student, teacher):
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.data.zero_()
        losses.append(first_loss("response", tmp_path, student, teacher, [row] * 4)["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0] > 1e-6


def test_h_03_temperature_squared(tmp_path):
    norms = []
    for temperature in (1.0, 4.0, 16.0):
        distiller = make(
            "response",
            tmp_path,
            student=qwen3(1),
            given={"soft_loss_fn_kwargs": {"temperature": temperature}},
            max_steps=1,
        )
        distiller.train()
        norms.append(training_logs(distiller)[0]["grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=0.2) and norms[2] == pytest.approx(norms[0], rel=0.2)


@pytest.mark.parametrize("sizes", [(60, 64), (64, 60)])
def test_h_06_padded_vocabularies(tmp_path, sizes, caplog):
    student, teacher = qwen3(1, vocab=sizes[0]), qwen3(0, vocab=sizes[1])
    rows = Rows(n=4, vocab=60, labels=False).rows
    batch = collate(rows)
    positions = [tuple(each) for each in batch["attention_mask"].nonzero().tolist()]
    with caplog.at_level("WARNING", logger="silverspoon_kd"):
        entry = first_loss("response", tmp_path, student, teacher, rows)
    assert entry["loss"] == pytest.approx(kl_by_hand(student, teacher, batch, positions, 60), rel=1e-5)
    assert any("60" in record.getMessage() and "64" in record.getMessage() for record in caplog.records)


def test_h_06_other_vocabularies_are_refused_with_both_sizes(tmp_path):
    with pytest.raises(ConfigurationError, match=r"64 entries and the teacher's 2000"):
        make("response", tmp_path, student=qwen3(1, vocab=64), teacher=qwen3(0, vocab=2000))


def test_h_08_half_precision_models(tmp_path):
    """Logged values are those of fp32 arithmetic on the same activations."""
    entries = []
    for dtype in (torch.float32, torch.bfloat16):
        student, teacher = qwen3(0), qwen3(0)
        with torch.no_grad():
            for parameter in teacher.parameters():
                parameter.copy_(parameter.bfloat16())
            student.load_state_dict(teacher.state_dict())
            student.lm_head.weight += 0.01 * torch.randn_like(student.lm_head.weight)
            student.lm_head.weight.copy_(student.lm_head.weight.bfloat16())
        entries.append(first_loss("response", tmp_path, student.to(dtype), teacher, Rows(n=4).rows)["loss"])
    assert entries[0] > 0
    assert entries[1] == pytest.approx(entries[0], rel=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_h_09_a_copy_of_the_teacher_has_no_loss(tmp_path, kind):
    assert first_loss(kind, tmp_path, qwen3(0), qwen3(0), Rows(n=4))["loss"] == pytest.approx(0, abs=1e-7)


def left_padded(pad, prompt=2):
    numbers = torch.Generator().manual_seed(5)
    rows = []
    for length in (4, 8, 5, 7):
        ids = torch.randint(1, 64, (length,), generator=numbers)
        blank = torch.full((8 - length,), pad)
        rows.append(
            {
                "input_ids": torch.cat([blank, ids]),
                "attention_mask": torch.cat([0 * blank, torch.ones_like(ids)]),
                "labels": torch.cat([0 * blank - 100, ids]),
            }
        )
    return rows


@pytest.mark.parametrize("kind", KINDS)
def test_h_12_content_of_left_padding_does_not_matter(tmp_path, kind):
    losses = []
    for pad in (0, 33):
        student, teacher = llama(1), llama(0)
        losses.append(first_loss(kind, tmp_path, student, teacher, left_padded(pad))["loss"])
    assert first_loss(kind, tmp_path, llama(0), llama(0), left_padded(33))["loss"] == pytest.approx(0, abs=1e-7)
    assert losses[0] > 1e-7
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def smoothed_by_hand(student, batch, epsilon):
    with torch.no_grad():
        logits = student(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.double()
    values = []
    for row, at in (batch["labels"][:, 1:] != -100).nonzero().tolist():
        log_p = logits[row, at].log_softmax(-1)
        values.append(float(-(1 - epsilon) * log_p[batch["labels"][row, at + 1]] - epsilon * log_p.mean()))
    return sum(values) / len(values)


@pytest.mark.parametrize("kind", KINDS)
def test_h_13_label_smoothing(tmp_path, kind):
    """The students' own loss is smoothed, in training and in evaluation; labels are still there."""
    student, rows = qwen3(1), Rows(n=4)
    given = {"train_dataset": rows, "eval_dataset": rows}
    changes = {"label_smoothing_factor": 0.1, "alpha": 0.5, "learning_rate": 0.0, "max_steps": 1}
    distiller = make(kind, tmp_path, student=student, given=given, **changes)
    distiller.train()
    entry, metrics = training_logs(distiller)[0], distiller.evaluate()
    assert entry["loss/task"] == pytest.approx(metrics["eval_task_loss"], rel=1e-6)
    assert distiller.predict(rows).label_ids.shape == (4, 12)
    if kind != "blockwise":
        assert entry["loss/task"] == pytest.approx(smoothed_by_hand(student, collate(rows.rows), 0.1), rel=1e-5)


def test_h_13_label_smoothing_without_the_students_own_loss(tmp_path):
    plain = first_loss("response", tmp_path, qwen3(1), qwen3(0), Rows(n=4))
    smoothed = first_loss("response", tmp_path, qwen3(1), qwen3(0), Rows(n=4), label_smoothing_factor=0.1)
    assert plain == smoothed


def test_h_13_column_named_label(tmp_path):
    def model(seed):
        torch.manual_seed(seed)
        config = transformers.BertConfig(
            vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
            num_labels=3,
        )  # fmt: skip
        return transformers.BertForSequenceClassification(config)

    rows = [{"input_ids": row["input_ids"], "label": index % 3} for index, row in enumerate(Rows(n=8).rows)]
    student = model(1).eval()
    given = {"train_dataset": rows, "eval_dataset": rows, "data_collator": None}
    changes = {"alpha": 1.0, "label_smoothing_factor": 0.2}
    distiller = make("response", tmp_path, student=student, teacher=model(0), given=given, **changes)
    metrics = distiller.evaluate()
    ids, labels = torch.stack([row["input_ids"] for row in rows]), torch.tensor([row["label"] for row in rows])
    with torch.no_grad():
        logits = student.eval()(input_ids=ids).logits
    wanted = functional.cross_entropy(logits, labels, label_smoothing=0.2)
    assert metrics["eval_loss"] == pytest.approx(float(wanted), rel=1e-5)
    distiller.train()


def test_h_13_smoothing_of_rows_without_labels(tmp_path):
    """A micro-batch whose labels are all -100 adds nothing, neither a loss nor a NaN."""
    rows = Rows(n=4).rows
    blank = [{**row, "labels": torch.full_like(row["labels"], -100)} for row in rows]
    results = []
    for data, accumulation in ((rows, 1), (rows + blank, 2)):
        student = qwen3(1)
        distiller = make(
            "response",
            tmp_path,
            student=student,
            given={"train_dataset": data},
            alpha=0.5,
            label_smoothing_factor=0.1,
            gradient_accumulation_steps=accumulation,
            train_sampling_strategy="sequential",
            max_steps=1,
        )
        distiller.train()
        results.append((weights(student), training_logs(distiller)[0]["loss"]))
    assert results[1][1] == pytest.approx(results[0][1], rel=1e-6)
    for name, value in results[0][0].items():
        torch.testing.assert_close(results[1][0][name], value, rtol=1e-5, atol=1e-7)


def test_h_13_compute_loss_func_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"compute_loss_func is not used.*alpha"):
        make("response", tmp_path, given={"compute_loss_func": lambda *args, **kwargs: 0.0})
