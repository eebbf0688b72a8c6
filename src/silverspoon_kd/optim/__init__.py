"""Parameter groups, optimizers, schedules and clipping per alignment."""

from silverspoon_kd.optim.clipping import clip_gradients
from silverspoon_kd.optim.composite import CompositeOptimizer, build_optimizer, fill_state, torch_optimizer
from silverspoon_kd.optim.groups import STUDENT_GROUP, GroupSpec, build_parameter_groups
from silverspoon_kd.optim.schedule import per_group_schedule

__all__ = [
    "STUDENT_GROUP",
    "CompositeOptimizer",
    "GroupSpec",
    "build_optimizer",
    "build_parameter_groups",
    "clip_gradients",
    "fill_state",
    "per_group_schedule",
    "torch_optimizer",
]
