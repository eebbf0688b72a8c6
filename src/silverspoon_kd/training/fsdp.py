"""An FSDP student: FSDP2 shards the root in place, by decoder layer, before its optimizer is made."""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from silverspoon_kd.capture import Tap, embeddings_of, find_module, keeps_to_itself, wrap_units
from silverspoon_kd.errors import ConfigurationError, PlacementError
from silverspoon_kd.student import StudentRoot
from silverspoon_kd.training.arguments import TrainingArguments

logger = logging.getLogger(__name__)


def settle_fsdp(args: TrainingArguments, student: nn.Module) -> bool:
    """Check what was asked for and leave to accelerate only what it does right; ``args`` is the run's own copy.

    Returns:
        Whether activations are to be recomputed: the wrapper modules of accelerate would change the blocks' names.

    Raises:
        ConfigurationError: it asks for what cannot work.
    """
    plugin, config = dict(args.fsdp_plugin_args), dict(args.fsdp_config or {})
    if plugin.get("fsdp_version", 2) != 2:
        raise ConfigurationError(
            "fsdp_config version=1 flattens the parameters, so they cannot be grouped by alignment; this library "
            "shards with FSDP2. Leave version out: all other settings mean the same."
        )
    if config.get("xla"):
        raise ConfigurationError("fsdp_config xla=True is not supported. Use FSDP2 on the accelerators of torch.")
    if "LOCAL" in str(plugin.get("state_dict_type")):
        raise ConfigurationError(
            "fsdp_config state_dict_type='LOCAL_STATE_DICT' does not exist in FSDP2. Use 'FULL_STATE_DICT' (one file "
            "that every number of ranks can load) or 'SHARDED_STATE_DICT' (each rank writes its share)."
        )
    if args.device.type == "cpu":
        plugin.pop("cpu_offload", None)  # the weights are there already
    recompute = bool(plugin.pop("activation_checkpointing", False))
    student_units(student, config)
    _make_room(student, first=args.process_index == 0)
    args.fsdp_plugin_args = {**plugin, "auto_wrap_policy": "NO_WRAP"}
    return recompute


@contextmanager
def sharding_enabled() -> Iterator[None]:
    """Let accelerate, which turns FSDP into DDP on CPUs without a word, keep FSDP there too.

    What it leaves behind in the environment goes, so that a later run in this process is not sharded unasked.
    """
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    given, before = AcceleratorState.__init__, os.environ.get("ACCELERATE_USE_FSDP")

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        given(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = init
    try:
        yield
    finally:
        AcceleratorState.__init__ = given
        if before is None:
            os.environ.pop("ACCELERATE_USE_FSDP", None)


def student_units(student: nn.Module, config: Mapping[str, Any]) -> list[nn.Module]:
    """Return the student's blocks that are gathered as units, innermost first.

    Raises:
        ConfigurationError: no module has a wanted class.
    """
    policy = str(config.get("auto_wrap_policy", "TRANSFORMER_BASED_WRAP")).upper()
    if policy == "NO_WRAP":
        return []
    threshold = int(config.get("min_num_params") or 0)
    sizes = threshold if policy == "SIZE_BASED_WRAP" and threshold else None
    classes = None if sizes else config.get("transformer_layer_cls_to_wrap")
    try:
        return wrap_units(student, classes, sizes, wish="fsdp_config transformer_layer_cls_to_wrap")
    except PlacementError as error:
        raise ConfigurationError(str(error)) from None


def shard_student(root: StudentRoot, args: TrainingArguments, accelerator: Any) -> None:
    """Shard the root in place where FSDP was asked for; every rank starts with the weights of the first one.

    Each block is a unit, as are embeddings and a head that share no weight; projectors and what else is left belong to
    the root. Units are received and sharded one after the other, so a rank that loaded nothing never holds all weights.

    Args:
        root: not wrapped yet.
        args: of the run, settled.
        accelerator: of the run; it will know the root as prepared.
    """
    if not args.fsdp:
        return
    config, plugin = args.fsdp_config, accelerator.state.fsdp_plugin
    blocks = student_units(root.student, config)
    mesh = init_device_mesh(args.device.type, (args.world_size,))
    shared: dict[str, Any] = {"mesh": mesh}
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        shared["offload_policy"] = plugin.cpu_offload
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    if dtype is not None:
        _keep_in_full_precision(root)
    reduce = torch.float32 if dtype is not None else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce)
    for unit in [*blocks, *_ends(root.student, blocks)]:
        _receive(unit.parameters(), mesh)
        fully_shard(unit, mp_policy=policy, reshard_after_forward=plugin.reshard_after_forward, **shared)
    _receive([*root.parameters(), *root.buffers()], mesh)
    # The batch and the teacher's activations keep their dtypes.
    own = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce, cast_forward_inputs=False)
    fully_shard(root, mp_policy=own, **shared)
    root.before_backward = partial(_gather_for_backward, root.student)
    in_order = [module for module in root.modules() if any(module is block for block in blocks)]
    _prefetch(in_order, config)
    # By itself it would take a model only together with an optimizer.
    accelerator._models.append(root)


def _ends(student: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """Return the input embeddings and the head where each can be a unit."""
    inside = {id(module) for block in blocks for module in block.modules()}
    found: list[nn.Module] = []
    if not blocks:
        return found
    for module in (embeddings_of(student, "input"), embeddings_of(student, "output")):
        if module is not None and id(module) not in inside and keeps_to_itself(module, student):
            found.append(module)
    return found


def _keep_in_full_precision(root: nn.Module) -> None:
    for parameter in root.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.float()


def _make_room(student: nn.Module, *, first: bool) -> None:
    """Put untouched memory, which takes up none, in the place of weights that only the first rank has loaded."""
    made: dict[int, nn.Parameter] = {}
    for path, module in student.named_modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if tensor.is_meta and first:
                raise ConfigurationError(
                    f"The student's {path}.{name} has no values (it is on the meta device), and the first rank's are "
                    "given to all. Load the student there."
                )
            if tensor.is_meta:
                empty = torch.empty_like(tensor, device="cpu")
                if isinstance(tensor, nn.Parameter):
                    empty = made.setdefault(id(tensor), nn.Parameter(empty, requires_grad=tensor.requires_grad))
                setattr(module, name, empty)


def _receive(tensors: Iterable[Tensor], mesh: DeviceMesh) -> None:
    """Give every rank the first rank's values; what is sharded already is left alone."""
    for tensor in tensors:
        if not isinstance(tensor, DTensor):
            _broadcast(tensor.data, mesh)


def _broadcast(tensor: Tensor, mesh: DeviceMesh) -> None:
    on_device = tensor.to(mesh.device_type).contiguous()
    dist.broadcast(on_device, src=0)
    if on_device.data_ptr() != tensor.data_ptr():
        tensor.copy_(on_device)


def _prefetch(blocks: list[nn.Module], config: Mapping[str, Any]) -> None:
    """Honour the settings of FSDP1 that transformers passes to nobody: FSDP2 has them as explicit lists."""
    if str(config.get("forward_prefetch", False)).lower() == "true":
        for first, second in pairwise(blocks):
            first.set_modules_to_forward_prefetch([second])  # type: ignore[operator]
    if str(config.get("backward_prefetch", "")).lower() == "backward_pre":
        for first, second in pairwise(blocks):
            second.set_modules_to_backward_prefetch([first])  # type: ignore[operator]


def _gather_for_backward(student: nn.Module, values: Mapping[Tap, Tensor]) -> None:
    """Gather the units around each recorded activation before its gradient goes on.

    FSDP gathers a unit when a gradient reaches the unit's own output. A loss on a module inside it, after which the
    forward may even have stopped, never gets there.
    """
    for tap, value in values.items():
        units = _units_around(student, tap.module)
        if units and value.requires_grad:
            value.register_hook(partial(_gather, units))


def _units_around(student: nn.Module, name: str) -> list[FSDPModule]:
    parts = name.split(".") if name else []
    modules = [find_module(student, ".".join(parts[:depth])) for depth in range(1, len(parts) + 1)]
    return [module for module in modules if isinstance(module, FSDPModule)]


def _gather(units: Sequence[FSDPModule], gradient: Tensor) -> Tensor:
    for unit in units:
        unit.unshard()
    return gradient
