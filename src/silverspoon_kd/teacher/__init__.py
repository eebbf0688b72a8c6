"""Where the teacher lives and how its activations are got."""

from silverspoon_kd.teacher.dedicated import DedicatedTeacher, start_world
from silverspoon_kd.teacher.executor import PreparedTeacher, TeacherExecutor, TeacherRun
from silverspoon_kd.teacher.facts import TeacherFacts
from silverspoon_kd.teacher.hygiene import (
    check_loaded,
    check_not_quantised,
    check_separate,
    freeze_teacher,
    is_self_placed,
    shares_base,
)
from silverspoon_kd.teacher.inline import EACH_RANK, TeacherBesideStudent
from silverspoon_kd.teacher.loading import load_model
from silverspoon_kd.teacher.memory import bytes_of, capacity

__all__ = [
    "EACH_RANK",
    "DedicatedTeacher",
    "PreparedTeacher",
    "TeacherBesideStudent",
    "TeacherExecutor",
    "TeacherFacts",
    "TeacherRun",
    "bytes_of",
    "capacity",
    "check_loaded",
    "check_not_quantised",
    "check_separate",
    "freeze_teacher",
    "is_self_placed",
    "load_model",
    "shares_base",
    "start_world",
]
