"""Batches as dictionaries, whatever the data set's rows are."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data import default_collate

from silverspoon_kd.errors import DataError


class DictCollator:
    """A collator whose batches are mappings.

    Rows and batches that are tuples ``(inputs..., labels)`` get the names of the student's forward, in order; one
    element more than the forward takes is the labels. Holds no model, so data loader workers can pickle it.
    """

    def __init__(self, collator: Callable[[list[Any]], Any], names: Sequence[str], *, given_by_user: bool) -> None:
        self.collator, self.names, self.given_by_user = collator, list(names), given_by_user

    def __call__(self, rows: list[Any]) -> Any:
        if isinstance(rows[0], Mapping) and not rows[0]:
            raise DataError(
                f"The data set has no column that teacher or student takes; the student takes {', '.join(self.names)}. "
                "Rename the columns, or map them with prepare_student_inputs and prepare_teacher_inputs."
            )
        plain_rows = isinstance(rows[0], (tuple, list)) and not self.given_by_user
        batch = default_collate(rows) if plain_rows else self.collator(rows)
        if isinstance(batch, Mapping):
            return batch
        parts = list(batch) if isinstance(batch, (tuple, list)) else [batch]
        names = [name for name in self.names if name != "labels"][: len(parts)]
        if len(parts) == len(names) + 1:
            names.append("labels")
        if len(parts) != len(names) or not names:
            raise DataError(
                f"A batch of {len(parts)} elements cannot be matched with the student's arguments "
                f"({', '.join(self.names)}) and labels. Return a dictionary from the data set or the collator."
            )
        return dict(zip(names, parts, strict=True))
