"""A short training of a parity case on the device, and how far it is from the float64 reference."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpu_checks.rows import Setting
from parity.by_reference import by_hand, named_losses, parameters
from parity.cases import MOVED, ONE, PARITY_CASES, Case
from parity.runs import build, relative
from support.reference import Result

BY_NAME = {case.name: case for case in PARITY_CASES}
# One of each distiller; two of them with projectors, two with the student's own loss.
THREE = [BY_NAME[name] for name in ("response-task", "holistic-narrow-task", "blockwise-narrow")]


@dataclass(frozen=True)
class Trained:
    """What a training left behind, on the CPU: parameters before and after, and the logged losses of each step."""

    before: dict[str, Tensor]
    after: dict[str, Tensor]
    losses: list[dict[str, float]]


def distiller_of(setting: Setting, case: Case, **options: Any) -> Any:
    """Return the distiller of a case on the device of the setting."""
    return build(case, ONE, setting.folder, use_cpu=setting.device == "cpu", **options)


def train(distiller: Any) -> Trained:
    """Train, and look whether the teacher stayed what it was."""
    teacher = distiller.teacher.state_dict()
    frozen = {name: tensor.clone() for name, tensor in teacher.items()}
    before = whole(distiller.root)
    distiller.train()
    distiller._executor.close()
    changed = [name for name, tensor in frozen.items() if not torch.equal(tensor, teacher[name])]
    if changed:
        raise AssertionError(f"training changed the teacher: {changed[:3]}")
    entries = [entry for entry in distiller.state.log_history if "loss" in entry]
    losses = [{key: value for key, value in entry.items() if key.startswith("loss")} for entry in entries]
    return Trained(before, whole(distiller.root), losses)


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of all parameters on the CPU, gathered where they are sharded."""
    named = ((name, parameter.detach()) for name, parameter in model.named_parameters())
    return {name: (each.full_tensor() if hasattr(each, "full_tensor") else each).cpu().clone() for name, each in named}


def error_of(trained: Trained, case: Case) -> float:
    """Return the largest relative error of weights and losses against the reference."""
    result = by_hand(case, trained.before)
    if relative(trained.after, trained.before) < MOVED:
        raise AssertionError("the weights have hardly moved")
    return max(relative(trained.after, parameters(result)), loss_error(trained.losses, result))


def loss_error(losses: list[dict[str, float]], result: Result) -> float:
    """Return the largest relative error of any logged loss."""
    pairs = list(zip(losses, named_losses(result), strict=True))
    return max(_relative(found, wanted) for found, wanted in pairs)


def _relative(found: Mapping[str, float], wanted: Mapping[str, float]) -> float:
    if found.keys() != wanted.keys():
        raise AssertionError(f"the losses {sorted(found)} were logged in place of {sorted(wanted)}")
    errors = [abs(found[name] - wanted[name]) / abs(wanted[name]) for name in wanted]
    # max() passes over what is not a number.
    return next((error for error in errors if error != error), max(errors))
