"""Which columns of a data set are used, and one row of it."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.utils.data import IterableDataset
from transformers.data.data_collator import DataCollatorWithPadding, default_data_collator
from transformers.utils.generic import find_labels

from silverspoon_kd.capture import InputView, base_of
from silverspoon_kd.errors import DataError
from silverspoon_kd.training.collate import DictCollator


def label_columns(student: nn.Module, wish: list[str] | None) -> list[str]:
    """Return the names of the labels: the user's, else those of the student's forward, else "labels"."""
    if wish is not None:
        return list(wish)
    found = find_labels(type(base_of(student)))
    return ["labels"] if "labels" in found or not found else found


def accepted_columns(student: nn.Module, teacher: nn.Module, labels: list[str]) -> list[str]:
    """Return every column that one of the models takes, and the labels under all names that collators know."""
    names = [*InputView(student, "student").names, *InputView(teacher, "teacher").names]
    return list(dict.fromkeys([*names, *labels, "labels", "label", "label_ids"]))


def example_batch(
    dataset: Any, collator: Callable[[list[Any]], Any] | None, processing_class: Any, student: nn.Module
) -> Mapping[str, Any] | None:
    """Return a batch of the first row of a data set with indices, None where there is none or it does not collate.

    An iterable data set is not touched: it may give each row only once.
    """
    if isinstance(dataset, dict):
        dataset = next(iter(dataset.values()), None)
    if dataset is None or isinstance(dataset, IterableDataset) or not callable(getattr(dataset, "__getitem__", None)):
        return None
    if len(dataset) == 0:
        raise DataError("The data set is empty. Check how it is built and filtered.")
    view = InputView(student, "student")
    default = DataCollatorWithPadding(processing_class) if processing_class is not None else default_data_collator
    wrapped = DictCollator(collator or default, view.names, given_by_user=collator is not None)
    try:
        return wrapped([dataset[0]])
    except DataError:
        raise
    except Exception:
        return None
