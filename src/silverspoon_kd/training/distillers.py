"""The three distillers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from silverspoon_kd.alignment import Alignment
from silverspoon_kd.distributed.plan import resolve_distiller
from silverspoon_kd.errors import AlignmentError
from silverspoon_kd.losses import Loss
from silverspoon_kd.objectives import BlockwiseObjective, HolisticObjective, ResponseObjective, logits_alignment
from silverspoon_kd.teacher import load_model
from silverspoon_kd.training.trainer import DistillationTrainer

Model = nn.Module | str | Callable[[], nn.Module]


class HolisticDistiller(DistillationTrainer):
    """All aligned modules learn together, in the student's own forward (feature distillation).

    Romero et al., "FitNets: Hints for Thin Deep Nets", 2015; Sun et al., "Patient Knowledge Distillation", 2019.

    Args:
        teacher_model: a module, a model id or folder, or a callable that builds the module.
        alignments: from :func:`~silverspoon_kd.create_alignments`; lists of several calls can be added.
        student_model: the student; None: the one the alignments were made for.
        **kwargs: ``args``, data sets, ``prepare_teacher_inputs``, ``prepare_student_inputs`` and everything that
            ``transformers.Trainer`` takes.

    Raises:
        ConfigurationError: the models, alignments or arguments cannot work together.
    """

    def __init__(
        self,
        teacher_model: Model,
        alignments: Sequence[Alignment],
        student_model: Model | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            student_model=_student(student_model, alignments),
            teacher_model=teacher_model,
            objective=HolisticObjective(alignments),
            **kwargs,
        )


class BlockwiseDistiller(DistillationTrainer):
    """Each aligned block learns alone, from the teacher's input to its block.

    Li et al., "Block-wisely Supervised Neural Architecture Search with Knowledge Distillation", 2020. The student runs
    one forward; the hidden states that come into each aligned block are replaced by the teacher's.

    Args:
        teacher_model: a module, a model id or folder, or a callable that builds the module.
        alignments: from :func:`~silverspoon_kd.create_alignments`; each student module at most once.
        student_model: the student; None: the one the alignments were made for.
        **kwargs: as for :class:`HolisticDistiller`.

    Raises:
        ConfigurationError: the models, alignments or arguments cannot work together.
    """

    def __init__(
        self,
        teacher_model: Model,
        alignments: Sequence[Alignment],
        student_model: Model | None = None,
        **kwargs: Any,
    ) -> None:
        names = [alignment.student_module_name for alignment in alignments]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise AlignmentError(f"Blockwise: {twice!r} is aligned twice, but a block has one input. Keep one of them.")
        super().__init__(
            student_model=_student(student_model, alignments),
            teacher_model=teacher_model,
            objective=BlockwiseObjective(alignments),
            **kwargs,
        )


class ResponseBasedDistiller(DistillationTrainer):
    """The student's logits learn from the teacher's.

    Hinton et al., "Distilling the Knowledge in a Neural Network", 2015.

    Args:
        student_model: a module, a model id or folder, or a callable that builds the module.
        teacher_model: the same for the teacher.
        soft_loss_fn: a loss name or a callable ``(student_logits, teacher_logits) -> scalar``; None: "kl_divergence".
        soft_loss_fn_kwargs: arguments of a named loss.
        **kwargs: as for :class:`HolisticDistiller`.

    Raises:
        ConfigurationError: the models or arguments cannot work together.
    """

    def __init__(
        self,
        student_model: Model,
        teacher_model: Model,
        soft_loss_fn: str | Loss | Callable[..., Any] | None = None,
        soft_loss_fn_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            student_model=load_model(student_model, "student"),
            teacher_model=teacher_model,
            objective=ResponseObjective([logits_alignment(soft_loss_fn or "kl_divergence", soft_loss_fn_kwargs)]),
            **kwargs,
        )


def Distiller(distiller_type: str, **kwargs: Any) -> DistillationTrainer:
    """Make a distiller by name.

    Args:
        distiller_type: "blockwise" or "bkd", "holistic" or "hkd", "response_based" or "reskd".
        **kwargs: the arguments of that distiller.

    Raises:
        ConfigurationError: the name is unknown.
    """
    kinds = {
        "blockwise": BlockwiseDistiller,
        "holistic": HolisticDistiller,
        "response_based": ResponseBasedDistiller,
    }
    return kinds[resolve_distiller(distiller_type)](**kwargs)


def _student(given: Model | None, alignments: Sequence[Alignment]) -> nn.Module:
    source = given if given is not None else getattr(alignments, "student", None)
    if source is None:
        raise AlignmentError(
            "There is no student: alignments made by hand do not remember one. Pass student_model=, or make them with "
            "create_alignments."
        )
    return load_model(source, "student")
