"""Learning-rate schedules per alignment, stepped as one."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers.optimization import get_scheduler
from transformers.trainer_utils import SchedulerType

from silverspoon_kd.errors import ConfigurationError, near_names


def per_group_schedule(
    optimizer: Optimizer,
    base: Callable[[Optimizer], LRScheduler],
    named: Mapping[str, str | Callable[..., LambdaLR]],
    num_warmup_steps: int,
    num_training_steps: int,
) -> LRScheduler:
    """Build one schedule in which some alignments follow their own curve and all others the base.

    Args:
        optimizer: Its groups carry ``"alignment"``.
        base: Makes the run's schedule for an optimizer.
        named: Alignment name -> scheduler name of transformers, or
            ``factory(optimizer, num_warmup_steps, num_training_steps) -> LambdaLR``.
        num_warmup_steps: Warm-up, in optimizer steps.
        num_training_steps: Length of the run, in optimizer steps.

    Returns:
        The base schedule where no group has an own one, else a ``LambdaLR`` with one function per group. It is stepped
        once per optimizer step.

    Raises:
        ConfigurationError: A schedule is unknown, or is not a function of the step and so cannot be mixed.
    """
    schedule = base(optimizer)
    groups = optimizer.param_groups
    own = {group["alignment"] for group in groups} & set(named)
    if not own:
        return schedule
    if not isinstance(schedule, LambdaLR):
        raise ConfigurationError(
            f"Schedulers of their own were asked for {sorted(own)}, but the run's {type(schedule).__name__} is not a "
            "function of the step, so the two cannot be stepped together. Choose another lr_scheduler_type, such as "
            "'linear'."
        )
    curves = list(schedule.lr_lambdas)
    for name in sorted(own):
        indices = [index for index, group in enumerate(groups) if group["alignment"] == name]
        own_curves = _curves(name, named[name], [groups[i] for i in indices], num_warmup_steps, num_training_steps)
        for index, curve in zip(indices, own_curves, strict=True):
            curves[index] = curve
    # Both schedules count from the groups' "initial_lr", so the first step that the base has applied leaves no trace.
    return LambdaLR(optimizer, curves)


def _curves(
    name: str,
    wish: str | Callable[..., LambdaLR],
    groups: list[dict[str, Any]],
    num_warmup_steps: int,
    num_training_steps: int,
) -> list[Callable[[int], float]]:
    # Some schedules read the peak rate from the optimizer, so they are made on a stand-in with this alignment's rates.
    tagged = [
        {**{key: value for key, value in group.items() if key not in ("params", "lr")}, "lr": group["initial_lr"]}
        for group in groups
    ]
    probe = torch.optim.SGD([{**group, "params": [torch.zeros(())]} for group in tagged], lr=groups[0]["initial_lr"])
    if isinstance(wish, str):
        schedule = _by_name(name, wish, probe, num_warmup_steps, num_training_steps)
    else:
        schedule = wish(probe, num_warmup_steps, num_training_steps)
    if not isinstance(schedule, LambdaLR):
        raise ConfigurationError(
            f"alignment {name!r}: scheduler={wish!r} gives a {type(schedule).__name__}, but only schedules that are a "
            "function of the step (LambdaLR) can be given to one alignment. Use 'linear', 'cosine', 'constant' or a "
            "factory that returns a LambdaLR."
        )
    return list(schedule.lr_lambdas)


def _by_name(name: str, wish: str, probe: Optimizer, num_warmup_steps: int, num_training_steps: int) -> LRScheduler:
    known = [kind.value for kind in SchedulerType]
    if wish not in known:
        raise ConfigurationError(
            f"alignment {name!r}: scheduler={wish!r} is unknown; transformers has {known}.{near_names(wish, known)}"
        )
    try:
        return get_scheduler(wish, probe, num_warmup_steps=num_warmup_steps, num_training_steps=num_training_steps)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"alignment {name!r}: scheduler={wish!r} cannot be built from the number of steps alone ({error}). Pass "
            "factory(optimizer, num_warmup_steps, num_training_steps) -> LambdaLR with its further arguments."
        ) from error
