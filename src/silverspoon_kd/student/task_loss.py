"""The student's own loss as a term: a sum over its labels."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers.trainer_pt_utils import LabelSmoother

from silverspoon_kd.capture import select_logits
from silverspoon_kd.errors import DataError, TrainingError
from silverspoon_kd.objectives import Positions, Term


def require_labels(inputs: Mapping[str, Any]) -> None:
    """Refuse inputs of the student from which it cannot compute its own loss.

    Raises:
        DataError: there are no labels.
    """
    if not any("label" in key or key.endswith("_positions") for key in inputs):
        raise DataError(
            "The student's own loss is asked for (alpha > 0, or e2e_eval_loss), but the batch has no labels: it has "
            f"{', '.join(sorted(inputs))}. Add a column of labels that the student's forward takes, or set alpha=0."
        )


def task_inputs(
    inputs: dict[str, Any], positions: Positions, *, smoothing: float, takes_num_items: bool
) -> dict[str, Any]:
    """Return the student's keyword arguments for a forward that computes its own loss as a mean over its labels.

    A transformers loss that is told the number of items divides its sum by it, one that is not takes the mean: telling
    it the number of labels of this very batch gives the mean either way, and 0 instead of NaN where there are none.

    Raises:
        DataError: there are no labels.
    """
    require_labels(inputs)
    if smoothing > 0:
        return {key: value for key, value in inputs.items() if key != "labels"}
    return {**inputs, "num_items_in_batch": positions.num_task.clamp(min=1)} if takes_num_items else inputs


def task_term(output: Any, labels: Tensor | None, positions: Positions, *, smoothing: float, shifts: bool) -> Term:
    """Return the term "task".

    Args:
        output: what the student returned for :func:`task_inputs`.
        labels: the labels, for label smoothing.
        positions: of this batch.
        smoothing: ``label_smoothing_factor``.
        shifts: labels are shifted by one.

    Raises:
        TrainingError: the student returned no loss.
    """
    if smoothing > 0:
        smoother = LabelSmoother(epsilon=smoothing)
        mean = smoother({"logits": select_logits(output)}, labels, shift_labels=shifts)
    else:
        mean = _loss_of(output)
    # The mean of no labels is NaN, and nothing times NaN is still NaN.
    total = (mean * positions.num_task).where(positions.num_task > 0, mean.new_zeros(()))
    return Term(name="task", total=total, unit="task")


def _loss_of(output: Any) -> Tensor:
    loss = (
        output.get("loss") if isinstance(output, Mapping) else output[0] if isinstance(output, (tuple, list)) else None
    )
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise TrainingError(
            f"alpha needs the student's own loss, but its forward returned {type(output).__name__} without a scalar "
            "'loss' (or a scalar first element) for a batch with labels. Set alpha=0, or return the loss."
        )
    return loss.reshape(())
