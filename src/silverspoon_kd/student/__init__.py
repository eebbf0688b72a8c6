"""The student side: the module that is trained."""

from silverspoon_kd.student.reach import flags_kept_on_error, only_trainable, reached_parameters
from silverspoon_kd.student.root import StepOptions, StudentRoot
from silverspoon_kd.student.task_loss import require_labels

__all__ = [
    "StepOptions",
    "StudentRoot",
    "flags_kept_on_error",
    "only_trainable",
    "reached_parameters",
    "require_labels",
]
