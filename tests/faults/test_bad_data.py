"""Data sets that cannot work are refused before the first step, with everything left as it was."""

import datasets
import pytest
import torch
from torch.utils.data import IterableDataset

from silverspoon_kd import ResponseBasedDistiller
from silverspoon_kd.errors import ConfigurationError, DataError
from support.tiny import Rows, arguments, collate, qwen3
from support.untouched import refused


def response(folder, student, teacher, rows=None, collator=collate, evaluation=None, **changes):
    return ResponseBasedDistiller(
        student,
        teacher,
        args=arguments(folder, **changes),
        train_dataset=Rows() if rows is None else rows,
        eval_dataset=evaluation,
        data_collator=collator,
    )


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def test_labels_needed_but_absent(tmp_path):
    teacher, student = qwen3(0), qwen3(1)
    match = r"own loss.*alpha.*no labels: it has attention_mask, input_ids.*alpha=0"
    with refused(DataError, match, tmp_path, teacher, student):
        response(tmp_path, student, teacher, Rows(labels=False), alpha=0.5)


def test_labels_needed_but_absent_in_a_stream(tmp_path):
    teacher, student = qwen3(0), qwen3(1)
    distiller = response(tmp_path, student, teacher, Stream(Rows(labels=False).rows), alpha=0.5)
    with refused(DataError, r"no labels: it has attention_mask, input_ids", tmp_path, teacher, student):
        distiller.train()


@pytest.mark.parametrize("several", [False, True])
def test_labels_needed_for_evaluation_but_absent(tmp_path, several):
    teacher, student = qwen3(0), qwen3(1)
    evaluation = {"first": Rows(n=4, labels=False)} if several else Rows(n=4, labels=False)
    with refused(DataError, r"e2e_eval_loss.*no labels", tmp_path, teacher, student):
        response(tmp_path, student, teacher, evaluation=evaluation, e2e_eval_loss="forward")


def text_rows(n=8):
    return [{"text": f"row {index}", "number": index} for index in range(n)]


@pytest.mark.parametrize("kind", ["list", "datasets"])
@pytest.mark.parametrize("collator", [None, collate])
def test_no_usable_column(tmp_path, kind, collator):
    teacher, student = qwen3(0), qwen3(1)
    rows = text_rows() if kind == "list" else datasets.Dataset.from_list(text_rows())
    match = r"has the columns text, number, but teacher and student take input_ids,.*prepare_student_inputs"
    with refused(DataError, match, tmp_path, teacher, student):
        response(tmp_path, student, teacher, rows, collator)


@pytest.mark.parametrize("collator", [None, collate])
def test_no_usable_column_in_a_stream(tmp_path, collator):
    teacher, student = qwen3(0), qwen3(1)
    distiller = response(tmp_path, student, teacher, Stream(text_rows()), collator)
    with refused(DataError, r"no column that teacher or student takes.*input_ids", tmp_path, teacher, student):
        distiller.train()


def test_no_usable_column_when_all_are_kept(tmp_path):
    teacher, student = qwen3(0), qwen3(1)
    rows = [{"number": torch.tensor(index)} for index in range(8)]
    match = r"student Qwen3ForCausalLM takes input_ids.*only number.*prepare_student_inputs"
    with refused(DataError, match, tmp_path, teacher, student):
        response(tmp_path, student, teacher, rows, remove_unused_columns=False)


def test_teacher_gets_nothing_from_its_function(tmp_path):
    teacher, student = qwen3(0), qwen3(1)
    with refused(DataError, r"teacher Qwen3ForCausalLM takes.*only ids.*prepare_teacher_inputs", tmp_path, teacher):
        ResponseBasedDistiller(
            student,
            teacher,
            args=arguments(tmp_path),
            train_dataset=Rows(),
            data_collator=collate,
            prepare_teacher_inputs=lambda batch: {"ids": batch["input_ids"]},
        )


def test_empty_data_set(tmp_path):
    teacher, student = qwen3(0), qwen3(1)
    with refused(DataError, r"data set is empty", tmp_path, teacher, student):
        response(tmp_path, student, teacher, [])


def test_h_07_ids_beyond_the_teachers_vocabulary(tmp_path):
    """All ids fit the student, and the gap of 50 could be padding: the first batch shows that it is not."""
    teacher, student = qwen3(0, vocab=50), qwen3(1, vocab=99)
    distiller = response(tmp_path, student, teacher, Rows(vocab=99))
    match = r"token id 9\d, but the teacher's vocabulary has 50 entries.*same tokenizer"
    with refused(ConfigurationError, match, tmp_path, teacher, student):
        distiller.train()


def test_h_07_vocabularies_of_different_tokenizers(tmp_path):
    teacher, student = qwen3(0, vocab=50), qwen3(1, vocab=101)
    with refused(ValueError, r"has 101 entries and the teacher's 50.*different tokenizers", tmp_path, teacher, student):
        response(tmp_path, student, teacher, Rows(vocab=101))
