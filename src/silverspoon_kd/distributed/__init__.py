"""Where the teacher lives and what will run. Imports the standard library only, never torch."""

from silverspoon_kd.distributed.plan import Plan, resolve_plan
from silverspoon_kd.distributed.split_gpu import setup_split_gpu
from silverspoon_kd.distributed.teacher_placement import TeacherPlacement

__all__ = ["Plan", "TeacherPlacement", "resolve_plan", "setup_split_gpu"]
