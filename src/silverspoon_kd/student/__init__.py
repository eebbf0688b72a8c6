"""The student side: the module that is trained."""

from silverspoon_kd.student.reach import only_trainable, reached_parameters
from silverspoon_kd.student.root import StepOptions, StudentRoot

__all__ = ["StepOptions", "StudentRoot", "only_trainable", "reached_parameters"]
