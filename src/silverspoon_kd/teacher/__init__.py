"""Where the teacher lives and how its activations are got."""

from silverspoon_kd.teacher.executor import TeacherExecutor, TeacherRun
from silverspoon_kd.teacher.hygiene import (
    check_loaded,
    check_separate,
    freeze_teacher,
    is_self_placed,
    shares_base,
)
from silverspoon_kd.teacher.inline import InlineExecutor, place_teacher
from silverspoon_kd.teacher.loading import load_model

__all__ = [
    "InlineExecutor",
    "TeacherExecutor",
    "TeacherRun",
    "check_loaded",
    "check_separate",
    "freeze_teacher",
    "is_self_placed",
    "load_model",
    "place_teacher",
    "shares_base",
]
