"""Parameter groups by alignment: every trainable parameter in exactly one group."""

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from silverspoon_kd.errors import ConfigurationError, near_names

logger = logging.getLogger(__name__)

STUDENT_GROUP = "student"
"""The group of everything that belongs to no alignment."""


@dataclass(frozen=True)
class GroupSpec:
    """What one alignment wants for its own parameters; None means the value of the training arguments.

    Attributes:
        name: Name of the alignment.
        learning_rate: Peak learning rate, >= 0.
        weight_decay: Weight decay of the parameters that decay at all, >= 0.
        max_grad_norm: Limit of the 2-norm of the alignment's own gradients, >= 0; 0 switches clipping off.
        optimizer: An optimizer name of transformers, or ``factory(param_groups) -> Optimizer``.
        scheduler: A scheduler name of transformers, or
            ``factory(optimizer, num_warmup_steps, num_training_steps) -> LambdaLR``.

    Raises:
        ConfigurationError: A number is negative or not finite, or a factory is neither a name nor callable.
    """

    name: str
    learning_rate: float | None = None
    weight_decay: float | None = None
    max_grad_norm: float | None = None
    optimizer: str | Callable[..., Any] | None = None
    scheduler: str | Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        owner = f"alignment {self.name!r}"
        for field in ("learning_rate", "weight_decay", "max_grad_norm"):
            value = getattr(self, field)
            if value is not None:
                check_amount(owner, field, value)
        for field in ("optimizer", "scheduler"):
            value = getattr(self, field)
            if not (value is None or isinstance(value, str) or callable(value)):
                raise ConfigurationError(
                    f"{owner}: {field} must be a name, a factory or None, but it is {value!r} "
                    f"({type(value).__name__}). Pass a name such as 'adamw_torch' or 'cosine', or a callable."
                )


def check_amount(owner: str, field: str, value: object) -> None:
    """Refuse everything but a finite number >= 0.

    Raises:
        ConfigurationError: ``value`` is no such number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ConfigurationError(
            f"{owner}: {field}={value!r} was asked, but it must be a finite number >= 0. "
            "Correct the value or leave it out."
        )


def build_parameter_groups(
    owned: Mapping[str, Sequence[tuple[str, nn.Parameter]]],
    specs: Mapping[str, GroupSpec],
    *,
    learning_rate: float,
    weight_decay: float,
    decay_names: Collection[str],
    projector_names: Collection[str] = frozenset(),
) -> list[dict[str, Any]]:
    """Divide the trainable parameters into optimizer groups: by alignment, by decay, by projector or not.

    Args:
        owned: Alignment name -> (parameter name, parameter) pairs; :data:`STUDENT_GROUP` holds the rest of the student.
        specs: Alignment name -> its wishes; a missing name has none.
        learning_rate: Learning rate of the groups that have no own.
        weight_decay: Weight decay of the groups that have no own.
        decay_names: Names of the parameters that are decayed; all others get weight decay 0.
        projector_names: Names of the parameters of projectors.

    Returns:
        Groups ``{"params", "lr", "weight_decay", "alignment", "decay", "projector"}`` in the order of ``owned``. Frozen
        parameters are in none of them and no group is empty.

    Raises:
        ConfigurationError: A parameter has two owners, a spec names no owner, or a number makes no sense.
    """
    check_amount("training arguments", "learning_rate", learning_rate)
    check_amount("training arguments", "weight_decay", weight_decay)
    trainable = {name: _trainable(pairs) for name, pairs in owned.items()}
    _check_single_owner(trainable)
    _check_specs(owned, specs)
    _warn_untrained(trainable)
    groups = []
    for name, pairs in trainable.items():
        spec = specs.get(name, GroupSpec(name))
        rate = learning_rate if spec.learning_rate is None else spec.learning_rate
        decay_rate = weight_decay if spec.weight_decay is None else spec.weight_decay
        for decay, projector, parameters in _split(pairs, decay_names, projector_names):
            groups.append(
                {
                    "params": parameters,
                    "lr": rate,
                    "weight_decay": decay_rate if decay else 0.0,
                    "alignment": name,
                    "decay": decay,
                    "projector": projector,
                }
            )
    return groups


def _trainable(pairs: Sequence[tuple[str, nn.Parameter]]) -> list[tuple[str, nn.Parameter]]:
    # A tied weight may be listed twice under one owner; the optimizer must see it once.
    unique = {id(parameter): (name, parameter) for name, parameter in reversed(pairs) if parameter.requires_grad}
    return list(reversed(unique.values()))


def _check_single_owner(trainable: Mapping[str, Sequence[tuple[str, nn.Parameter]]]) -> None:
    owners: dict[int, str] = {}
    for owner, pairs in trainable.items():
        for name, parameter in pairs:
            first = owners.setdefault(id(parameter), owner)
            if first != owner:
                raise ConfigurationError(
                    f"Parameter {name!r} belongs to {first!r} and to {owner!r}, so it would be stepped twice. "
                    "Align modules that do not contain one another and do not share weights."
                )


def _check_specs(owned: Mapping[str, Sequence[tuple[str, nn.Parameter]]], specs: Mapping[str, GroupSpec]) -> None:
    for name in specs:
        if name not in owned:
            raise ConfigurationError(
                f"Settings were given for alignment {name!r}, but the alignments here are {sorted(owned)}."
                f"{near_names(name, owned)}"
            )


def _warn_untrained(trainable: Mapping[str, Sequence[tuple[str, nn.Parameter]]]) -> None:
    untrained = [name for name, pairs in trainable.items() if not pairs and name != STUDENT_GROUP]
    if untrained:
        logger.warning(
            "No trainable parameter belongs to %s: the loss counts, but nothing is optimized for it. Thaw the module, "
            "add a projector, or drop the alignment.",
            ", ".join(repr(name) for name in untrained),
        )


def _split(
    pairs: Sequence[tuple[str, nn.Parameter]], decay_names: Collection[str], projector_names: Collection[str]
) -> list[tuple[bool, bool, list[nn.Parameter]]]:
    cells: dict[tuple[bool, bool], list[nn.Parameter]] = {
        (decay, projector): [] for projector in (False, True) for decay in (True, False)
    }
    for name, parameter in pairs:
        cells[name in decay_names, name in projector_names].append(parameter)
    return [(decay, projector, parameters) for (decay, projector), parameters in cells.items() if parameters]
