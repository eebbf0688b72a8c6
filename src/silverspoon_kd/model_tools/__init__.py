"""Make students, freeze parts of them, fold projectors into them and read them back from checkpoints."""

from silverspoon_kd.model_tools.checkpoint import (
    load_student_weights_from_checkpoint,
    load_student_with_projectors_from_checkpoint,
)
from silverspoon_kd.model_tools.freeze import freeze_parameters
from silverspoon_kd.model_tools.fuse import fuse_projectors_into_module
from silverspoon_kd.model_tools.prune import prune_model
from silverspoon_kd.model_tools.reconfig import reconfig_model

__all__ = [
    "freeze_parameters",
    "fuse_projectors_into_module",
    "load_student_weights_from_checkpoint",
    "load_student_with_projectors_from_checkpoint",
    "prune_model",
    "reconfig_model",
]
