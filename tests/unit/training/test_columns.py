"""Which columns of a data set reach which model."""

import logging

import datasets
import pytest
import torch
import transformers
from torch import nn

from silverspoon_kd.errors import DataError
from support.distil import make, training_logs
from support.tiny import Rows, collate, qwen3


def bert(seed, **changes):
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, type_vocab_size=2, num_labels=3, attn_implementation="eager", **changes,
    )  # fmt: skip
    return transformers.BertForTokenClassification(config)


def distil_bert(seed):
    torch.manual_seed(seed)
    config = transformers.DistilBertConfig(
        vocab_size=64, dim=16, n_layers=2, n_heads=2, hidden_dim=32, max_position_embeddings=32, num_labels=3,
        attn_implementation="eager",
    )  # fmt: skip
    return transformers.DistilBertForTokenClassification(config)


def note_calls(model):
    """The columns that each forward of a model is given."""
    calls = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(set(kwargs) - {"use_cache"}), with_kwargs=True
    )
    return calls


def classified(n=16, **columns):
    """Rows for token classification with token types; further columns by name."""
    numbers = torch.Generator().manual_seed(3)
    rows = []
    for index in range(n):
        row = {
            "input_ids": torch.randint(1, 64, (8,), generator=numbers),
            "attention_mask": torch.tensor([1] * (5 + index % 4) + [0] * (3 - index % 4)),
            "token_type_ids": torch.randint(0, 2, (8,), generator=numbers),
            "labels": torch.randint(0, 3, (8,), generator=numbers),
        }
        rows.append(row | {name: value(index) for name, value in columns.items()})
    return rows


def as_datasets(rows):
    plain = [{name: value.tolist() if torch.is_tensor(value) else value for name, value in row.items()} for row in rows]
    return datasets.Dataset.from_list(plain)


EXTRA = {"teacher_extra": lambda index: torch.tensor(index), "text": lambda index: f"row {index}"}


@pytest.mark.parametrize("source", ["list", "datasets"])
def test_i_10_columns_that_only_the_teacher_takes_are_kept(tmp_path, source):
    teacher, student = bert(0), distil_bert(1)
    rows = classified(**EXTRA)
    if source == "datasets":
        rows = as_datasets(rows)
    to_teacher, to_student = note_calls(teacher), note_calls(student)
    given = {"train_dataset": rows, "eval_dataset": rows, "data_collator": None}
    distiller = make("response", tmp_path, teacher=teacher, student=student, given=given, max_steps=2)
    to_teacher.clear(), to_student.clear()
    distiller.train()
    distiller.evaluate()
    assert set.union(*to_teacher) == set.intersection(*to_teacher)
    assert to_teacher[0] == {"input_ids", "attention_mask", "token_type_ids"}
    assert set.union(*to_student) == {"input_ids", "attention_mask"}


def test_i_10_what_the_teacher_takes_matters(tmp_path):
    losses = []
    for kind in (0, 1):
        rows = [{**row, "token_type_ids": torch.full((8,), kind)} for row in classified()]
        given = {"train_dataset": rows}
        distiller = make("response", tmp_path, teacher=bert(0), student=distil_bert(1), given=given, max_steps=1)
        losses.append(distiller.train().training_loss)
    assert losses[0] != losses[1]


def test_i_10_dropped_columns_are_named_in_the_log(tmp_path, caplog):
    transformers.utils.logging.enable_propagation()
    given = {"train_dataset": classified(**EXTRA), "data_collator": None}
    distiller = make("response", tmp_path, teacher=bert(0), student=distil_bert(1), given=given, max_steps=1)
    level = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_info()
    try:
        with caplog.at_level(logging.INFO):
            distiller.train()
    finally:
        transformers.utils.logging.set_verbosity(level)
        transformers.utils.logging.disable_propagation()
    (message,) = {record.getMessage() for record in caplog.records if "have been ignored" in record.getMessage()}
    assert "teacher_extra" in message and "text" in message and "token_type_ids" not in message


@pytest.mark.parametrize("source", ["list", "datasets"])
def test_i_10_all_columns_can_be_kept(tmp_path, source):
    rows, seen = classified(**EXTRA), []

    def collator(batch):
        seen.append(set(batch[0]))
        kept = [{name: torch.as_tensor(value) for name, value in row.items() if name != "text"} for row in batch]
        return {**collate(kept), "text": [row["text"] for row in batch]}

    if source == "datasets":
        rows = as_datasets(rows)
    distiller = make(
        "response",
        tmp_path,
        teacher=bert(0),
        student=distil_bert(1),
        given={"train_dataset": rows, "eval_dataset": rows, "data_collator": collator},
        remove_unused_columns=False,
        alpha=0.5,
        max_steps=2,
    )
    distiller.train()
    distiller.evaluate()
    assert all({"teacher_extra", "text"} < names for names in seen)


def test_label_column_named_label(tmp_path):
    """The default collator renames it."""
    rows = [{**row, "label": index % 3} for index, row in enumerate(classified())]
    for row in rows:
        del row["labels"]

    def model(seed):
        torch.manual_seed(seed)
        return transformers.BertForSequenceClassification(bert(seed).config)

    given = {"train_dataset": rows, "eval_dataset": rows, "data_collator": None}
    changes = {"alpha": 0.5, "max_steps": 2, "per_device_eval_batch_size": 4}
    distiller = make("response", tmp_path, teacher=model(0), student=model(1), given=given, **changes)
    distiller.train()
    assert all(entry["loss/task"] > 0 for entry in training_logs(distiller))
    assert distiller.predict(rows).label_ids.tolist() == [index % 3 for index in range(16)]


def test_prepare_functions_give_each_model_its_own_inputs(tmp_path):
    """The teacher's vocabulary is another one; its ids come in columns of their own."""
    teacher, student = qwen3(0, vocab=500), qwen3(1, hidden=16)
    rows = [{**row, "teacher_ids": row["input_ids"] + 400, "student_ids": row["input_ids"]} for row in Rows(n=16).rows]
    for row in rows:
        del row["input_ids"]
    seen = {"teacher": [], "student": []}
    teacher.register_forward_pre_hook(
        lambda module, args, kwargs: seen["teacher"].append(kwargs["input_ids"]), with_kwargs=True
    )
    student.register_forward_pre_hook(
        lambda module, args, kwargs: seen["student"].append(kwargs["input_ids"]), with_kwargs=True
    )

    def prepare(name):
        return lambda batch: {**batch, "input_ids": batch.pop(name)}

    given = {
        "train_dataset": rows,
        "eval_dataset": rows[:6],
        "prepare_teacher_inputs": prepare("teacher_ids"),
        "prepare_student_inputs": prepare("student_ids"),
    }
    distiller = make("holistic", tmp_path, teacher=teacher, student=student, given=given, alpha=0.5)
    for calls in seen.values():
        calls.clear()
    distiller.train()
    distiller.evaluate()
    distiller.predict(rows[:4])
    assert len(seen["teacher"]) == len(seen["student"]) == 6
    for other, own in zip(seen["teacher"], seen["student"], strict=True):
        assert torch.equal(other, own + 400)


def test_prepare_function_of_the_student_alone(tmp_path):
    """Labels made on the way count as labels."""
    rows = Rows(n=16, labels=False)

    def prepare(batch):
        return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}

    given = {"train_dataset": rows, "eval_dataset": rows, "prepare_student_inputs": prepare}
    distiller = make("response", tmp_path, given=given, alpha=0.5)
    distiller.train()
    metrics = distiller.evaluate()
    labelled = [{**row, "labels": row["input_ids"].masked_fill(row["attention_mask"] == 0, -100)} for row in rows.rows]
    given = {"train_dataset": labelled, "eval_dataset": labelled}
    plain = make("response", tmp_path, given=given, alpha=0.5)
    plain.train()
    wanted = plain.evaluate()
    for key in ("eval_loss", "eval_task_loss", "eval_loss/logits"):
        assert metrics[key] == wanted[key]


def test_tuples_get_the_names_of_the_forward(tmp_path):
    rows = [(row["input_ids"], row["attention_mask"]) for row in Rows(n=16)]
    given = {"train_dataset": rows, "data_collator": None}
    tuples = make("response", tmp_path, given=given)
    tuples.train()
    named = make("response", tmp_path, given={"train_dataset": Rows(n=16, labels=False)})
    named.train()
    assert training_logs(tuples) == training_logs(named)


def test_tuples_that_fit_nothing(tmp_path):
    class Net(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    rows = [(torch.randn(4), torch.tensor(1), torch.tensor(2)) for _ in range(8)]
    with pytest.raises(DataError, match=r"batch of 3 elements cannot be matched with the student's arguments \(x\)"):
        given = {"train_dataset": rows, "data_collator": None}
        make("response", tmp_path, teacher=Net(4, 3), student=Net(4, 3), given=given)
