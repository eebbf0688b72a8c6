"""``TrainingArguments``: everything of transformers, and what distillation adds."""

from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from typing import Any

import transformers

from silverspoon_kd.distributed import TeacherPlacement
from silverspoon_kd.errors import ConfigurationError
from silverspoon_kd.training.deepspeed import readable_config


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """Arguments of a distillation run: all of ``transformers.TrainingArguments``, and these.

    Attributes:
        teacher_placement: None or "replicated", "sharded", a :class:`~silverspoon_kd.distributed.TeacherPlacement`, a
            dict of its fields, or that dict as JSON text.
        overlap_teacher_forward: run teacher and student forwards at the same time; None: when the teacher's devices
            differ from the student's.
        teacher_lookahead: how many further steps the teacher may run ahead when overlap is on.
        teacher_timeout: seconds to wait for an answer of a dedicated teacher before the run fails.
        teacher_load_timeout: seconds to wait until a dedicated teacher is loaded.
        teacher_micro_batches: into how many parts a dedicated "pp" teacher cuts a batch, so that its devices work at
            the same time; None: as many as it has devices, on CPU slots one.
        alpha: share of the student's own task loss, 0..1: ``(1 - alpha) * distillation + alpha * task``.
        fused_losses: compute KL, reverse KL and JSD of logits from hidden states and output heads, without the logits
            of a whole batch; None: where that is possible; True: fail where it is not.
        magnitude_aware_weighting: divide each term by its detached magnitude before its weight.
        backward_per_block: blockwise only: keep the activations of one block at a time (activation checkpointing).
        clip_projectors: projector gradients count for, and take part in, clipping.
        e2e_eval_loss: "forward": evaluation also reports the student's own loss end to end.
        count_flops: log the floating-point operations of the training steps.
        enable_profiling: write ``torch.profiler`` traces.
        profiling_output_dir: folder of the traces; None: ``profile`` in ``output_dir``.
        profiling_wait: steps to skip first.
        profiling_warmup: steps to run without recording.
        profiling_active: steps to record.
        profiling_repeat: how many such cycles; 0: until the end.
        profiling_with_stack: record Python stacks.
    """

    teacher_placement: Any = field(default=None, metadata={"help": "Where the teacher lives."})
    overlap_teacher_forward: bool | None = field(
        default=None, metadata={"help": "Teacher and student forwards at the same time; default: where devices differ."}
    )
    teacher_lookahead: int = field(default=1, metadata={"help": "Further steps the teacher may run ahead."})
    teacher_timeout: float = field(
        default=1800.0, metadata={"help": "Seconds to wait for an answer of a dedicated teacher."}
    )
    teacher_load_timeout: float = field(
        default=3600.0, metadata={"help": "Seconds to wait until a dedicated teacher is loaded."}
    )
    teacher_micro_batches: int | None = field(
        default=None, metadata={"help": "Parts that a dedicated 'pp' teacher cuts a batch into; default: its devices."}
    )
    alpha: float = field(default=0.0, metadata={"help": "Share of the student's own task loss, 0..1."})
    fused_losses: bool | None = field(
        default=None, metadata={"help": "Losses on logits without whole logits; default: where that is possible."}
    )
    magnitude_aware_weighting: bool = field(
        default=False, metadata={"help": "Divide each term by its magnitude before its weight."}
    )
    backward_per_block: bool = field(default=False, metadata={"help": "Blockwise: peak memory of one block."})
    clip_projectors: bool = field(default=True, metadata={"help": "Projector gradients take part in clipping."})
    e2e_eval_loss: str | None = field(
        default=None, metadata={"help": "'forward': evaluation reports the student's own loss too."}
    )
    count_flops: bool = field(default=False, metadata={"help": "Log floating-point operations."})
    enable_profiling: bool = field(default=False, metadata={"help": "Write torch.profiler traces."})
    profiling_output_dir: str | None = field(default=None, metadata={"help": "Folder of the traces."})
    profiling_wait: int = field(default=1, metadata={"help": "Steps to skip first."})
    profiling_warmup: int = field(default=1, metadata={"help": "Steps to run without recording."})
    profiling_active: int = field(default=3, metadata={"help": "Steps to record."})
    profiling_repeat: int = field(default=1, metadata={"help": "Number of cycles; 0: until the end."})
    profiling_with_stack: bool = field(default=False, metadata={"help": "Record Python stacks."})

    def __post_init__(self) -> None:
        if self.teacher_placement is not None:
            self.teacher_placement = TeacherPlacement.from_value(self.teacher_placement)
        if self.overlap_teacher_forward is not None and not isinstance(self.overlap_teacher_forward, bool):
            raise ConfigurationError(
                f"overlap_teacher_forward={self.overlap_teacher_forward!r} is not a choice. Give None, True or False."
            )
        if self.fused_losses is not None and not isinstance(self.fused_losses, bool):
            raise ConfigurationError(f"fused_losses={self.fused_losses!r} is not a choice. Give None, True or False.")
        if isinstance(self.alpha, bool) or not 0 <= self.alpha <= 1:
            raise ConfigurationError(
                f"alpha={self.alpha!r} is not between 0 (distillation only) and 1 (task loss only)."
            )
        if self.teacher_lookahead < 0:
            raise ConfigurationError(f"teacher_lookahead={self.teacher_lookahead} is negative. Give 0 or more steps.")
        for name in ("teacher_timeout", "teacher_load_timeout"):
            if getattr(self, name) <= 0:
                raise ConfigurationError(f"{name}={getattr(self, name)} is not positive. Give seconds.")
        if self.teacher_micro_batches is not None and self.teacher_micro_batches < 1:
            raise ConfigurationError(
                f"teacher_micro_batches={self.teacher_micro_batches} is not positive. Give 1 or more parts, or None."
            )
        if self.e2e_eval_loss not in (None, "forward"):
            raise ConfigurationError(f"e2e_eval_loss={self.e2e_eval_loss!r} is unknown. Use None or 'forward'.")
        with readable_config(self) if self.deepspeed else nullcontext():
            super().__post_init__()

    def to_dict(self) -> dict[str, Any]:
        """Return the values as JSON takes them."""
        values = super().to_dict()
        if isinstance(self.teacher_placement, TeacherPlacement):
            placement = self.teacher_placement
            values["teacher_placement"] = {item.name: getattr(placement, item.name) for item in fields(placement)}
        return values
