"""Knowledge distillation on top of the transformers Trainer.

Every public name is imported when it is first used, so that ``setup_split_gpu`` can run before torch is imported.
"""

from typing import TYPE_CHECKING

from silverspoon_kd._lazy import lazy_attributes

if TYPE_CHECKING:  # the same table of contents, for type checkers and editors
    from silverspoon_kd._version import __version__
    from silverspoon_kd.alignment import Alignment, create_alignments
    from silverspoon_kd.distributed import TeacherPlacement, setup_split_gpu
    from silverspoon_kd.errors import (
        AlignmentError,
        CheckpointError,
        ConfigurationError,
        DataError,
        DeviceStateError,
        LossError,
        MissingDependencyError,
        PlacementError,
        SilverSpoonError,
        TeacherError,
        TrainingError,
    )
    from silverspoon_kd.losses import get_loss_function, jsd_loss, kl_divergence_loss, register_loss
    from silverspoon_kd.model_tools import (
        freeze_parameters,
        fuse_projectors_into_module,
        load_student_weights_from_checkpoint,
        load_student_with_projectors_from_checkpoint,
        prune_model,
        reconfig_model,
    )
    from silverspoon_kd.training.arguments import TrainingArguments
    from silverspoon_kd.training.distillers import (
        BlockwiseDistiller,
        Distiller,
        HolisticDistiller,
        ResponseBasedDistiller,
    )

_SOURCES = {
    # distillers and their arguments
    "BlockwiseDistiller": "silverspoon_kd.training.distillers",
    "Distiller": "silverspoon_kd.training.distillers",
    "HolisticDistiller": "silverspoon_kd.training.distillers",
    "ResponseBasedDistiller": "silverspoon_kd.training.distillers",
    "TrainingArguments": "silverspoon_kd.training.arguments",
    # what teaches what
    "Alignment": "silverspoon_kd.alignment",
    "create_alignments": "silverspoon_kd.alignment",
    # where the teacher lives
    "TeacherPlacement": "silverspoon_kd.distributed",
    "setup_split_gpu": "silverspoon_kd.distributed",
    # losses
    "get_loss_function": "silverspoon_kd.losses",
    "jsd_loss": "silverspoon_kd.losses",
    "kl_divergence_loss": "silverspoon_kd.losses",
    "register_loss": "silverspoon_kd.losses",
    # model tools
    "freeze_parameters": "silverspoon_kd.model_tools",
    "fuse_projectors_into_module": "silverspoon_kd.model_tools",
    "load_student_weights_from_checkpoint": "silverspoon_kd.model_tools",
    "load_student_with_projectors_from_checkpoint": "silverspoon_kd.model_tools",
    "prune_model": "silverspoon_kd.model_tools",
    "reconfig_model": "silverspoon_kd.model_tools",
    # errors
    "AlignmentError": "silverspoon_kd.errors",
    "CheckpointError": "silverspoon_kd.errors",
    "ConfigurationError": "silverspoon_kd.errors",
    "DataError": "silverspoon_kd.errors",
    "LossError": "silverspoon_kd.errors",
    "MissingDependencyError": "silverspoon_kd.errors",
    "DeviceStateError": "silverspoon_kd.errors",
    "PlacementError": "silverspoon_kd.errors",
    "SilverSpoonError": "silverspoon_kd.errors",
    "TeacherError": "silverspoon_kd.errors",
    "TrainingError": "silverspoon_kd.errors",
    # about the package
    "__version__": "silverspoon_kd._version",
}

__all__ = [
    "Alignment",
    "AlignmentError",
    "BlockwiseDistiller",
    "CheckpointError",
    "ConfigurationError",
    "DataError",
    "Distiller",
    "HolisticDistiller",
    "LossError",
    "MissingDependencyError",
    "DeviceStateError",
    "PlacementError",
    "ResponseBasedDistiller",
    "SilverSpoonError",
    "TeacherError",
    "TeacherPlacement",
    "TrainingArguments",
    "TrainingError",
    "__version__",
    "create_alignments",
    "freeze_parameters",
    "fuse_projectors_into_module",
    "get_loss_function",
    "jsd_loss",
    "kl_divergence_loss",
    "load_student_weights_from_checkpoint",
    "load_student_with_projectors_from_checkpoint",
    "prune_model",
    "reconfig_model",
    "register_loss",
    "setup_split_gpu",
]

__getattr__, __dir__ = lazy_attributes(__name__, _SOURCES)
