"""Where the teacher lives and how its activations are got."""

from silverspoon_kd.teacher.dedicated import DedicatedTeacher, start_world
from silverspoon_kd.teacher.executor import PreparedTeacher, TeacherExecutor, TeacherRun
from silverspoon_kd.teacher.hygiene import (
    check_loaded,
    check_separate,
    freeze_teacher,
    is_self_placed,
    shares_base,
)
from silverspoon_kd.teacher.inline import TeacherBesideStudent
from silverspoon_kd.teacher.loading import load_model

__all__ = [
    "DedicatedTeacher",
    "PreparedTeacher",
    "TeacherBesideStudent",
    "TeacherExecutor",
    "TeacherRun",
    "check_loaded",
    "check_separate",
    "freeze_teacher",
    "is_self_placed",
    "load_model",
    "shares_base",
    "start_world",
]
