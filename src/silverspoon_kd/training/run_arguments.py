"""The arguments as one run uses them: a copy, so that the user's object can serve another distiller."""

import copy
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from silverspoon_kd.capture import base_of
from silverspoon_kd.distributed import TeacherPlacement
from silverspoon_kd.distributed.plan import Plan, resolve_plan
from silverspoon_kd.distributed.split_gpu import check_student_processes, require_split_done
from silverspoon_kd.errors import ConfigurationError
from silverspoon_kd.student import StepOptions
from silverspoon_kd.training.arguments import TrainingArguments
from silverspoon_kd.training.deepspeed import own_config
from silverspoon_kd.training.fsdp import settle_fsdp

logger = logging.getLogger(__name__)


def run_arguments(args: TrainingArguments | None, kind: str, student: nn.Module) -> TrainingArguments:
    """Return a copy of ``args`` for one run of a distiller.

    Raises:
        ConfigurationError: the arguments are of transformers only, or ask for what cannot work.
    """
    if args is None:
        args = TrainingArguments(output_dir="tmp_trainer")
    if not isinstance(args, TrainingArguments):
        raise ConfigurationError(
            f"args is a {type(args).__module__}.{type(args).__name__}. Use silverspoon_kd.TrainingArguments, which "
            "takes the same fields."
        )
    if args.torch_compile:
        raise ConfigurationError(
            "torch_compile=True cannot work with distillation hooks: a compiled graph does not run them. Leave it off."
        )
    _check_output_dir(Path(args.output_dir))
    args = copy.copy(args)
    args.label_smoothing_factor = 0.0
    # The Trainer writes its own wish into the user's config; every forward says use_cache=False anyway.
    args.use_cache = getattr(getattr(student, "config", None), "use_cache", args.use_cache)
    args.max_grad_norm = args.max_grad_norm or 0.0
    if args.n_gpu > 1:
        logger.warning(
            "One process sees %d devices and trains on one. Start with torchrun --nproc_per_node=%d to use all.",
            args.n_gpu,
            args.n_gpu,
        )
        args._n_gpu = 1
    if args.backward_per_block:
        _check_per_block(kind, student)
        _set_checkpointing(args, True)
    if args.fsdp and settle_fsdp(args, student):
        _set_checkpointing(args, True)
    _leave_reentrant(args)
    own_config(args)
    if args.ddp_find_unused_parameters is None:
        # What no loss reaches is frozen, so DDP need not search, unless layers are dropped at random.
        args.ddp_find_unused_parameters = _drops_layers(student)
    return args


def refuse_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse what the Trainer takes and a distiller cannot use.

    Raises:
        ConfigurationError: one of them is given.
    """
    for name, advice in {
        "model_init": "Pass the student itself.",
        "compute_loss_func": "Register the loss with register_loss, or mix the student's own loss in with alpha.",
    }.items():
        if arguments.get(name) is not None:
            raise ConfigurationError(f"{name} is not used by distillers: the root computes every loss. {advice}")


def step_options(args: TrainingArguments) -> StepOptions:
    """Return the plain numbers of a step, from the arguments as the user gave them."""
    return StepOptions(
        alpha=args.alpha,
        magnitude_aware=args.magnitude_aware_weighting,
        label_smoothing=args.label_smoothing_factor,
        end_to_end=args.e2e_eval_loss == "forward",
    )


def autocast_dtype(args: TrainingArguments) -> torch.dtype | None:
    """Return the dtype of mixed precision."""
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None


def run_plan(args: TrainingArguments, kind: str) -> Plan:
    """Return what will run.

    Raises:
        PlacementError: it cannot.
    """
    placement, split = args.teacher_placement, None
    if isinstance(placement, TeacherPlacement):
        split = require_split_done(placement)
        check_student_processes(placement, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    plan = resolve_plan(
        distiller=kind,
        placement=placement,
        split=split,
        student_mode=_student_mode(args),
        num_student_ranks=args.world_size,
        num_nodes=_num_nodes(args.world_size),
        overlap=args.overlap_teacher_forward,
        lookahead=args.teacher_lookahead,
    )
    plan.require_runnable()
    for note in plan.notes if args.process_index == 0 else ():
        logger.warning("%s", note)
    return plan


def _num_nodes(num_ranks: int) -> int:
    """Return the number of nodes, which launchers tell by the ranks of one; without a launcher it is one."""
    return max(num_ranks // int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks)), 1)


def _student_mode(args: TrainingArguments) -> str:
    if args.deepspeed:
        config = args.hf_deepspeed_config
        return f"deepspeed-{int(config.get_value('zero_optimization.stage', 0) or 0)}"
    if args.fsdp:
        return "fsdp"
    return "ddp" if args.world_size > 1 else "single"


def _check_output_dir(folder: Path) -> None:
    file = next((path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()), None)
    if file is not None:
        raise ConfigurationError(
            f"output_dir={str(folder)!r} cannot be a folder, because {file} is a file. Give another output_dir, or "
            "move the file."
        )


def _check_per_block(kind: str, student: nn.Module) -> None:
    if kind != "blockwise":
        raise ConfigurationError(
            f"backward_per_block=True needs independent blocks, but this is a {kind} run. Use gradient_checkpointing."
        )
    if not getattr(student, "supports_gradient_checkpointing", False):
        raise ConfigurationError(
            f"backward_per_block=True recomputes each block, which {type(student).__name__} does not support."
        )


def _drops_layers(student: nn.Module) -> bool:
    config = getattr(base_of(student), "config", None)
    names = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
    return any((getattr(config, name, 0) or 0) > 0 for name in names)


def _set_checkpointing(args: TrainingArguments, value: bool) -> None:
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        if hasattr(args, name):
            setattr(args, name, value)


def _leave_reentrant(args: TrainingArguments) -> None:
    """Replace re-entrant checkpointing: what is recorded inside it has no gradient. The numbers are the same."""
    names = ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")
    wishes: dict[str, dict[str, Any]] = {name: dict(getattr(args, name) or {}) for name in names if hasattr(args, name)}
    if any(wish.get("use_reentrant") for wish in wishes.values()):
        logger.warning("use_reentrant=True hides activations from the losses; use_reentrant=False is used instead.")
    for name, wish in wishes.items():
        setattr(args, name, {**wish, "use_reentrant": False})
