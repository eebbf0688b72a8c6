"""Batches as JSON and a list of tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from silverspoon_kd.errors import TeacherError


def encode(tree: Any, tensors: list[Tensor]) -> Any:
    """Return a JSON form of ``tree`` whose tensors are numbers into ``tensors``, which is appended to.

    Raises:
        TeacherError: something in it is neither a tensor nor JSON.
    """
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return {"tensor": len(tensors) - 1}
    if isinstance(tree, Mapping):
        return {"dict": {str(key): encode(value, tensors) for key, value in tree.items()}}
    if isinstance(tree, (list, tuple)):
        return {"list": [encode(value, tensors) for value in tree]}
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return {"value": tree}
    raise TeacherError(
        f"A {type(tree).__name__} in the teacher's batch cannot be sent to the teacher's processes. Send tensors, "
        "numbers, strings and containers of them; drop or map the rest with prepare_teacher_inputs."
    )


def decode(form: Any, tensors: Sequence[Tensor]) -> Any:
    """Return what :func:`encode` was given; tuples come back as lists."""
    if "tensor" in form:
        return tensors[form["tensor"]]
    if "dict" in form:
        return {key: decode(value, tensors) for key, value in form["dict"].items()}
    if "list" in form:
        return [decode(value, tensors) for value in form["list"]]
    return form["value"]
