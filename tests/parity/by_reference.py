"""What the float64 reference makes of a parity case."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from parity.cases import Case, ParityRows, build_student, build_teacher
from support.reference import Pair, Recipe, Result, distil

LAYERS = (0, 2)


def by_hand(case: Case, before: Mapping[str, Tensor], num_shares: int = 1, **changes: Any) -> Result:
    """What the reference makes of a case whose root began with the parameters ``before``."""
    pairs = [
        Pair(
            layer,
            layer,
            weight=case.loss_weight,
            input_projector=linear(before, f"projectors.{index}.input"),
            output_projector=linear(before, f"projectors.{index}.output"),
        )
        for index, layer in enumerate(LAYERS)
    ]
    recipe = Recipe(
        kind=case.distiller,
        learning_rate=case.learning_rate,
        pairs=pairs if case.distiller != "response" else (),
        alpha=case.alpha,
        num_shares=num_shares,
        max_grad_norm=case.arguments.get("max_grad_norm", 0.0),
    )
    rows = ParityRows(4 * case.steps, equal=case.equal_rows).rows
    steps = [rows[start : start + 4] for start in range(0, len(rows), 4)]
    return distil(build_teacher(case), build_student(case), dataclasses.replace(recipe, **changes), steps)


def linear(before: Mapping[str, Tensor], name: str) -> nn.Linear | None:
    """The projector of that name as it was before training, or None."""
    weight, bias = before.get(f"{name}.weight"), before.get(f"{name}.bias")
    if weight is None or bias is None:
        return None
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.load_state_dict({"weight": weight, "bias": bias})
    return layer


def parameters(result: Result) -> dict[str, Tensor]:
    """The reference's parameters under the root's names."""
    found = {f"student.{name}": each.detach() for name, each in result.student.named_parameters()}
    for index, pair in enumerate(result.pairs):
        for side, layer in (("input", pair.input_projector), ("output", pair.output_projector)):
            own = layer.named_parameters() if layer is not None else ()
            found |= {f"projectors.{index}.{side}.{name}": each.detach() for name, each in own}
    return found


def named_losses(result: Result) -> list[dict[str, float]]:
    """The reference's losses of each step under the names in the log."""
    return [
        {name if name == "loss" else f"loss/{name}": value for name, value in step.items()} for step in result.losses
    ]
