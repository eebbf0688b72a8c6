"""DeepSpeed for the student: a config that a distiller can work with, gradients clipped where the engine steps.

The engine is made, stepped and saved by transformers and accelerate. Here is what they leave open: CPU processes, one
norm for each alignment, weights that ZeRO-3 partitions when they are made, and checkpoints of another number of ranks.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, final

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper, HfDeepSpeedConfig
from torch import Tensor, nn

from silverspoon_kd.distributed.plan import Plan
from silverspoon_kd.errors import CheckpointError, ConfigurationError, MissingDependencyError
from silverspoon_kd.optim import GroupSpec, clip_gradients

# Path of an entry -> the values that cannot work, and why; a value is compared in lower case.
_REFUSED = {
    "zero_optimization.zenflow": (None, "it steps a part of the weights at other times than the clipping"),
    "zero_optimization.offload_optimizer.super_offload": ({"true"}, "it clips in a process of its own"),
    "zero_optimization.offload_optimizer.device": ({"nvme"}, "gradients on disk cannot be clipped; use 'cpu'"),
    "compile.deepcompile": ({"true"}, "compiled graphs do not run the hooks of distillation"),
    "amp.enabled": ({"true"}, "it needs apex; use bf16"),
}
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


# ---- arguments ------------------------------------------------------------------------------------------------------


@contextmanager
def readable_config(args: Any) -> Iterator[None]:
    """Let transformers read the config of ``args`` as a distiller needs it; the user's own value is left as it is.

    Raises:
        ConfigurationError: the config cannot be read or cannot work, or there is no process group to come.
        MissingDependencyError: the package is not installed.
    """
    if find_spec("deepspeed") is None:
        raise MissingDependencyError(
            "deepspeed= was given, but the package is not installed. Install it with "
            "pip install 'silverspoon-kd[deepspeed]', or leave the argument out."
        )
    if "LOCAL_RANK" not in os.environ and not dist.is_initialized():
        raise ConfigurationError(
            "deepspeed= needs a process group, but this process was started alone. Start it with torchrun "
            "--nproc_per_node=1, or more."
        )
    given = args.deepspeed
    _choose_device(args)
    args.deepspeed = _config_of(args)
    try:
        yield
    finally:
        args.deepspeed = given
    _connect(args)


def own_config(args: Any) -> None:
    """Give a run's copy of the arguments a config of its own: training fills in what depends on its model and length.

    Raises:
        ConfigurationError: the config cannot be read any more, or is only accelerate's.
    """
    if not args.deepspeed:
        if args.deepspeed_plugin is not None:
            raise ConfigurationError(
                "The launcher asks for DeepSpeed (ACCELERATE_USE_DEEPSPEED). Give its config as deepspeed= in the "
                "TrainingArguments, and start with torchrun."
            )
        # accelerate imports an installed DeepSpeed in every run, which then says that it has found no accelerator.
        logging.getLogger("DeepSpeed").addFilter(_says_something_else)
        return
    logging.getLogger("DeepSpeed").removeFilter(_says_something_else)
    from accelerate.utils import DeepSpeedPlugin
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    config = HfTrainerDeepSpeedConfig(_config_of(args))
    config.trainer_config_process(args)
    # Each alignment is clipped on its own before the step, and DeepSpeed would clip to 1.0 if nothing were said.
    config.config["gradient_clipping"] = 0.0
    args.hf_deepspeed_config, args.deepspeed_plugin = config, DeepSpeedPlugin(hf_ds_config=config)


def _says_something_else(record: logging.LogRecord) -> bool:
    return record.funcName != "get_accelerator"


def check_alignments(args: Any, specs: Mapping[str, GroupSpec]) -> None:
    """Refuse what alignments want and one flat optimizer, or DeepSpeed's own schedule, cannot give.

    Raises:
        ConfigurationError: an alignment wants it.
    """
    own = [name for name, spec in specs.items() if spec.optimizer is not None]
    if own:
        raise ConfigurationError(
            f"{own[0]!r} asks for an optimizer of its own, but DeepSpeed trains with one flat optimizer. Leave it out; "
            "learning_rate, weight_decay, scheduler and max_grad_norm of an alignment work."
        )
    own = [name for name, spec in specs.items() if spec.learning_rate is not None or spec.scheduler is not None]
    if own and args.hf_deepspeed_config.get_value("scheduler") is not None:
        raise ConfigurationError(
            f"{own[0]!r} asks for a learning rate or schedule of its own, but the 'scheduler' in the DeepSpeed config "
            "gives all parameters one rate. Take it out of the config and use lr_scheduler_type."
        )


def _choose_device(args: Any) -> None:
    """Settle that everything is on CPU where it can only be there, for transformers and DeepSpeed alike."""
    wanted = os.environ.get("DS_ACCELERATOR")
    args.use_cpu = args.use_cpu or wanted == "cpu" or (wanted is None and not torch.accelerator.is_available())
    if not args.use_cpu:
        return
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    name = get_accelerator().device_name()
    if name != "cpu":
        raise ConfigurationError(
            f"use_cpu=True was asked for, but DeepSpeed has already chosen {name!r}. Set DS_ACCELERATOR=cpu before the "
            "program starts."
        )
    # It would be compiled at its first use, which takes minutes and a compiler; gloo does the same.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _connect(args: Any) -> None:
    """Tell DeepSpeed of the process group, so that a model partitioned when it is made knows the number of ranks."""
    from deepspeed import comm

    if not comm.is_initialized():
        comm.init_distributed(
            dist_backend="gloo" if args.use_cpu else None,
            auto_mpi_discovery=False,
            verbose=False,
            timeout=timedelta(seconds=args.ddp_timeout),
        )


def _config_of(args: Any) -> dict[str, Any]:
    given = args.deepspeed
    try:
        config = HfDeepSpeedConfig(given)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        shown = given if isinstance(given, str) else type(given).__name__
        raise ConfigurationError(
            f"deepspeed={shown!r} cannot be read ({error}). Give the path of a JSON file, or a dict."
        ) from error
    _check_config(config, args)
    values = config.config
    for name in _BATCH:
        values.setdefault(name, "auto")
    zero = values.setdefault("zero_optimization", {})
    zero.setdefault("stage", 0)
    if zero["stage"] == 3:
        # A checkpoint is a folder for from_pretrained too.
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    values.pop("gradient_clipping", None)  # see own_config
    values["zero_allow_untested_optimizer"] = True
    if args.use_cpu or not _is_adamw(args):
        # DeepSpeed's own optimizer on CPU is an AdamW, whatever was asked for, and is compiled at its first use.
        values.setdefault("zero_force_ds_cpu_optimizer", False)
    optimizer = values.get("optimizer") or {}
    if args.use_cpu and str(optimizer.get("type", "")).lower() in ("adam", "adamw"):
        optimizer.setdefault("params", {}).setdefault("torch_adam", True)
    return values


def _check_config(config: HfDeepSpeedConfig, args: Any) -> None:
    stage = config.get_value("zero_optimization.stage", 0)
    if stage not in (0, 1, 2, 3):
        raise ConfigurationError(f"zero_optimization.stage={stage!r} in the DeepSpeed config is no stage. Give 0 to 3.")
    for path, (values, reason) in _REFUSED.items():
        value = config.get_value(path)
        if value is not None and (values is None or str(value).lower() in values):
            raise ConfigurationError(f"{path}={value!r} in the DeepSpeed config cannot work here: {reason}.")
    clipping = config.get_value("gradient_clipping", "auto")
    if clipping not in ("auto", None, args.max_grad_norm):
        raise ConfigurationError(
            f"gradient_clipping={clipping} in the DeepSpeed config, but max_grad_norm={args.max_grad_norm}. Leave the "
            "first out, or 'auto': every alignment is clipped on its own, to max_grad_norm if it has no other limit."
        )
    offloads = config.get_value("zero_optimization.offload_optimizer.device") not in (None, "none")
    if offloads and config.is_true("zero_force_ds_cpu_optimizer") and not _is_adamw(args):
        raise ConfigurationError(
            f"zero_force_ds_cpu_optimizer=true in the DeepSpeed config replaces optim={_name(args.optim)!r} with "
            "AdamW. Leave it out, or use optim='adamw_torch'."
        )


def _is_adamw(args: Any) -> bool:
    return _name(args.optim).startswith("adamw_torch")


def _name(choice: Any) -> str:
    return str(getattr(choice, "value", choice))


@contextmanager
def accelerator_of_its_own(args: Any) -> Iterator[None]:
    """Let accelerate start anew, since it takes one plugin for ever, and take back what it leaves in the environment.

    With ACCELERATE_USE_DEEPSPEED left there, every later run of this process would use DeepSpeed.
    """
    if not args.deepspeed:
        yield
        return
    before = os.environ.get("ACCELERATE_USE_DEEPSPEED")
    AcceleratorState._reset_state()
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)


# ---- weights that are partitioned when they are made ----------------------------------------------------------------


@contextmanager
def made_whole() -> Iterator[None]:
    """Let transformers make models inside the block as if there were no ZeRO-3: a teacher is not the engine's."""
    from transformers.integrations import deepspeed as integration

    known = integration._hf_deepspeed_config_weak_ref
    integration.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        integration._hf_deepspeed_config_weak_ref = known


def is_partitioned(model: nn.Module) -> bool:
    """Tell whether ZeRO-3 holds the weights of ``model``, of which every rank has a part."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def gather_for_good(model: nn.Module) -> None:
    """Replace weights that ZeRO-3 partitioned when they were made with ordinary ones; all ranks together."""
    if not is_partitioned(model):
        return
    from deepspeed.runtime.zero import GatheredParameters

    parts = [parameter for parameter in model.parameters() if hasattr(parameter, "ds_id")]
    whole: dict[int, nn.Parameter] = {}
    for part in parts:
        with GatheredParameters([part]):
            whole[id(part)] = nn.Parameter(part.detach().clone(), requires_grad=part.requires_grad)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) in whole:
                module.register_parameter(name, whole[id(parameter)])


# ---- the step -------------------------------------------------------------------------------------------------------


@final
class ClippingEngine(DeepSpeedEngineWrapper):
    """What accelerate calls for a backward, which also steps the optimizer; between the two, gradients are clipped.

    Args:
        engine: of DeepSpeed.
        before_step: called when all gradients of a step are reduced.
    """

    def __init__(self, engine: Any, before_step: Callable[[], None]) -> None:
        super().__init__(engine)
        self._before_step = before_step

    def backward(self, loss: Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        # Without ZeRO the engine would divide by the accumulation what begins at an output of its forward.
        self.engine.backward(loss.clone(), **kwargs)
        if sync_gradients:
            self._before_step()
            self.engine.step()


def clip_in_engine(engine: Any, limits: Mapping[str, float | None], *, clip_projectors: bool) -> dict[str, Tensor]:
    """Clip the gradients that the engine is about to step with; see :func:`~silverspoon_kd.optim.clip_gradients`.

    Args:
        engine: after a backward, before its step.
        limits: alignment name -> limit.
        clip_projectors: projectors take part.

    Returns:
        Alignment name -> norm before clipping, over all ranks.
    """
    parts, divided = _gradients_in(engine)
    groups = [
        {**group, "params": [_holder(part) for part in own or [torch.zeros(0, device=engine.device)]]}
        for group, own in zip(engine.optimizer.param_groups, parts, strict=True)
    ]

    def over_ranks(squares: Tensor) -> Tensor:
        total = squares.to(engine.device)
        dist.all_reduce(total)
        return total.to(squares.device)

    scale = float(engine.optimizer.loss_scale) if engine.fp16_enabled() else 1.0
    norms = clip_gradients(
        groups,
        {name: limit and limit * scale for name, limit in limits.items()},
        clip_projectors=clip_projectors,
        over_ranks=over_ranks if divided else None,
        # The scaling of fp16 losses is adapted to what overflows, and skips that step itself.
        zero_broken=not engine.fp16_enabled(),
    )
    return {name: norm / scale for name, norm in norms.items()}


def _gradients_in(engine: Any) -> tuple[list[list[Tensor]], bool]:
    """Return this rank's gradients for each parameter group, and whether they are a part of them."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    optimizer = engine.optimizer
    num_groups = len(optimizer.param_groups)
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        flat = optimizer.single_partition_of_fp32_groups
        if optimizer.cpu_offload:
            return [[flat[index].grad] for index in range(num_groups)], True
        return [list(optimizer.averaged_gradients[index]) for index in range(num_groups)], True
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        parts: list[list[Tensor]] = [[] for _ in range(num_groups)]
        for subgroup, group in optimizer.sub_group_to_group_id.items():
            offloaded = optimizer.offload_optimizer
            flat = optimizer.fp32_partitioned_groups_flat
            parts[group] += [flat[subgroup].grad] if offloaded else optimizer.averaged_gradients[subgroup]
        return parts, True
    if isinstance(optimizer, BF16_Optimizer):
        return [[gradient] for gradient in optimizer.fp32_groups_actual_gradients_flat], False
    if isinstance(optimizer, FP16_Optimizer | FP16_UnfusedOptimizer):
        groups = optimizer.fp16_groups
    else:
        groups = [group["params"] for group in optimizer.param_groups]
    return [[each.grad for each in group if each.grad is not None] for group in groups], False


def _holder(gradient: Tensor) -> Tensor:
    """Return something whose ``grad`` it is, at no cost in memory."""
    holder = gradient.detach()
    holder.grad = gradient.detach()
    return holder


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def check_same_ranks(folder: Any, saved: Mapping[str, Any], plan: Plan) -> None:
    """Refuse a checkpoint whose engine state was divided among another number of ranks.

    Args:
        folder: of the checkpoint.
        saved: its plan.
        plan: of this run, which trains the student in the same way.

    Raises:
        CheckpointError: it was.
    """
    before, now = saved["num_student_ranks"], plan.num_student_ranks
    if plan.student_mode.startswith("deepspeed") and before != now:
        raise CheckpointError(
            f"The checkpoint {folder} holds the state of {before} DeepSpeed ranks, which cannot be divided anew among "
            f"{now}. Resume on {before}, or start a new run from its student."
        )
