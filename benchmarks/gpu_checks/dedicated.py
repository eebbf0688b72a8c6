"""A teacher in processes of its own that shares the student's device, since there is only one."""

import json
import os
from functools import partial

from gpu_checks.rows import Checks, Found, Setting
from gpu_checks.runs import THREE, distiller_of, error_of, train
from parity.cases import Case
from silverspoon_kd.distributed import TeacherPlacement, split_gpu


def checks(setting: Setting) -> Checks:
    """Return the checks of this file: each strategy, each with another distiller."""
    runs = list(zip(("pp", "tp", "sharded"), THREE, strict=True))
    for strategy, case in runs[:1] if setting.quick else runs:
        yield f"dedicated {strategy} {case.name}", partial(dedicated, setting, strategy, case)


def dedicated(setting: Setting, strategy: str, case: Case) -> Found:
    """Losses and weights are those of the reference."""
    placement = TeacherPlacement([0], strategy, device_type=setting.device)
    share_the_one_device(placement)
    distiller = distiller_of(setting, case, teacher_placement=placement)
    return Found(error_of(train(distiller), case), setting.exact, distiller.plan.teacher)


def share_the_one_device(placement: TeacherPlacement) -> None:
    """Act as if ``setup_split_gpu`` had given device 0 to the student and to the teacher, which it refuses to do.

    For this check alone: the two would fight for the memory and the time of the device.
    """
    record = {"device_type": placement.resolved_device_type, "student_ids": [0], "teacher_ids": [0], "environment": {}}
    os.environ[split_gpu.SPLIT_VARIABLE] = json.dumps(record)
    split_gpu.Split.teacher_indices = property(lambda split: split.student_ids)  # type: ignore[method-assign]
