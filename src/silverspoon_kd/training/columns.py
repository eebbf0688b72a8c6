"""Which columns of a data set are used, and one row of it."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import nn
from torch.utils.data import IterableDataset
from transformers.data.data_collator import DataCollatorWithPadding, default_data_collator
from transformers.utils.generic import find_labels

from silverspoon_kd.capture import InputView, base_of
from silverspoon_kd.errors import DataError
from silverspoon_kd.student import require_labels
from silverspoon_kd.training.collate import DictCollator

logger = logging.getLogger(__name__)

Prepare = Callable[[dict[str, Any]], dict[str, Any]]


def label_columns(student: nn.Module, wish: list[str] | None) -> list[str]:
    """Return the names of the labels: the user's, else those of the student's forward, else "labels"."""
    if wish is not None:
        return list(wish)
    found = find_labels(type(base_of(student)))
    return ["labels"] if "labels" in found or not found else found


def used_columns(student: nn.Module, teacher: Sequence[str] | None, labels: list[str]) -> list[str] | None:
    """Return every column that one of the models takes, and the labels under all names that collators know.

    Args:
        student: the student.
        teacher: what the teacher's forward takes; None: columns of any name.
        labels: names of the labels.

    Returns:
        The columns; None where a forward takes ``**kwargs`` of any name, so that no column can be called unused.
    """
    view = InputView(student, "student")
    if view.takes_everything or teacher is None:
        return None
    return list(dict.fromkeys([*view.names, *teacher, *labels, "labels", "label", "label_ids"]))


def example_batch(
    dataset: Any,
    collator: Callable[[list[Any]], Any] | None,
    processing_class: Any,
    student: nn.Module,
    columns: Collection[str] | None,
) -> Mapping[str, Any] | None:
    """Return a batch of the first row of a data set with indices, None where there is none or it does not collate.

    An iterable data set is not touched: it may give each row only once.

    Args:
        dataset: rows by index; of a dictionary of data sets the first one.
        collator: the user's.
        processing_class: of the run, for the default collator.
        student: whose argument names are given to rows that are tuples.
        columns: what is kept of a row; None: everything.

    Raises:
        DataError: there is no row, or none of its columns is kept.
    """
    if isinstance(dataset, dict):
        dataset = next(iter(dataset.values()), None)
    if dataset is None or isinstance(dataset, IterableDataset) or not callable(getattr(dataset, "__getitem__", None)):
        return None
    if len(dataset) == 0:
        raise DataError("The data set is empty. Check how it is built and filtered.")
    row = dataset[0]
    if columns is not None and isinstance(row, Mapping):
        row = _without_unused(row, columns)
    view = InputView(student, "student")
    default = DataCollatorWithPadding(processing_class) if processing_class is not None else default_data_collator
    wrapped = DictCollator(collator or default, view.names, given_by_user=collator is not None)
    try:
        return wrapped([row])
    except DataError:
        raise
    except Exception as error:
        # A collator is the user's code and may fail in any way; the first real batch then fails as itself.
        logger.debug("The first row does not collate: %s", error)
        return None


def checked_examples(
    batches: Sequence[tuple[Mapping[str, Any] | None, bool]],
    student: nn.Module,
    teacher: nn.Module | None,
    prepare_student: Prepare | None,
    prepare_teacher: Prepare | None,
) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
    """Return the first batch as the student and as the teacher get it, after a look at all of them.

    Args:
        batches: each with whether the student's own loss is wanted for it; None where there is no example.
        student: the student.
        teacher: the teacher; None where it is in other processes, which look themselves.
        prepare_student: the user's function of the student's batch.
        prepare_teacher: the user's function of the teacher's batch.

    Raises:
        DataError: a model takes nothing of a batch, or the student's own loss is wanted and there are no labels.
    """
    found = []
    for batch, needs_labels in batches:
        if batch is None:
            continue
        own = prepare_student(dict(batch)) if prepare_student else batch
        other = prepare_teacher(dict(batch)) if prepare_teacher else batch
        inputs = InputView(student, "student")(own, with_labels=needs_labels)
        if needs_labels:
            require_labels(inputs)
        if teacher is not None:
            InputView(teacher, "teacher")(other)
        found.append((own, other))
    return found[0] if found else (None, None)


def _without_unused(row: Mapping[str, Any], columns: Collection[str]) -> dict[str, Any]:
    kept = {name: value for name, value in row.items() if name in columns}
    if not kept:
        raise DataError(
            f"The data set has the columns {', '.join(row)}, but teacher and student take {', '.join(columns)}. "
            "Rename the columns, or map them with prepare_student_inputs and prepare_teacher_inputs."
        )
    return kept
