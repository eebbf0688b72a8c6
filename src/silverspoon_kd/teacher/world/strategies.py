"""How the teacher is spread over the devices of its world."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from silverspoon_kd.capture import base_of
from silverspoon_kd.errors import PlacementError, TeacherError
from silverspoon_kd.teacher.hygiene import check_not_quantised, freeze_teacher, is_self_placed
from silverspoon_kd.teacher.loading import describe_model, load_model
from silverspoon_kd.teacher.sharding import shard_frozen
from silverspoon_kd.teacher.world.spec import WorldSpec
from silverspoon_kd.versions import apply_tensor_plan


def build_teacher(spec: WorldSpec, rank: int, describe: Callable[[nn.Module], None]) -> nn.Module:
    """Load, freeze and spread the teacher as process ``rank`` of its world; ``describe`` sees it while it is whole."""
    if spec.device_type != "cpu":
        # Sharding asks for the current device, which would be the student's.
        torch.accelerator.set_device_index(spec.devices[rank])
    teacher = load_model(spec.source, "teacher")
    freeze_teacher(teacher)
    describe(teacher)
    place = {"pp": place_pipeline, "tp": place_tensor, "sharded": place_sharded}[spec.strategy]
    return place(teacher, spec, rank)


def place_pipeline(teacher: nn.Module, spec: WorldSpec, rank: int) -> nn.Module:
    """Spread whole blocks over all devices of the one process, in order, balanced by size."""
    from silverspoon_kd.teacher.world.dispatch import dispatch, move_once

    if is_self_placed(teacher):
        move_once(teacher)
        return teacher
    devices = [f"{spec.device_type}:{index}" for index in spec.devices]
    if spec.device_type == "cpu" or len(devices) == 1:
        return teacher.to("cpu" if spec.device_type == "cpu" else devices[0])
    return dispatch(teacher, devices)


def place_tensor(teacher: nn.Module, spec: WorldSpec, rank: int) -> nn.Module:
    """Split weights over one process a device, by the model's own tensor-parallel plan."""
    check_source(teacher, "tp", len(spec.devices))
    device = _device(spec, rank)
    if len(spec.devices) == 1:
        return teacher.to(device)
    base: Any = base_of(teacher)
    mesh = init_device_mesh(spec.device_type, (len(spec.devices),))
    if _has_torch_styles(base):
        parallelize_module(base.to(device), mesh, base._tp_plan)
    else:
        _apply_named_styles(base, mesh, device)
    return teacher.to(device)


def _apply_named_styles(base: Any, mesh: DeviceMesh, device: torch.device) -> None:
    tied = _tied_head(base)
    apply_tensor_plan(base, mesh, device, "lm_head" if tied else None)
    if tied:
        base.lm_head.weight = base.get_input_embeddings().weight


def _has_torch_styles(model: Any) -> bool:
    styles = getattr(model, "_tp_plan", None)
    return isinstance(styles, Mapping) and bool(styles) and all(isinstance(s, ParallelStyle) for s in styles.values())


def check_source(source: nn.Module | str | Callable[[], nn.Module], strategy: str, num_devices: int) -> None:
    """Refuse, before anything is loaded, what cannot be split; what a callable will build is not known yet.

    Raises:
        PlacementError: as :func:`check_tensor_plan`, or the weights are quantised.
    """
    if strategy != "pp" and num_devices > 1:
        check_not_quantised(source, f"strategy={strategy!r}")
    if strategy != "tp":
        return
    if isinstance(source, nn.Module):
        check_tensor_plan(source, num_devices)
    elif isinstance(source, str):
        described = describe_model(source, "teacher")
        _check_tensor_plan(described.model_class, described.config, num_devices)


def check_tensor_plan(teacher: nn.Module, num_devices: int) -> None:
    """Refuse what cannot be split.

    Raises:
        PlacementError: there is no plan, or heads do not divide.
    """
    base: Any = base_of(teacher)
    _check_tensor_plan(base, getattr(base, "config", None), num_devices)


def _check_tensor_plan(model: Any, config: Any, num_devices: int) -> None:
    name = model.__name__ if isinstance(model, type) else type(model).__name__
    if not getattr(model, "_tp_plan", None) and not getattr(config, "base_model_tp_plan", None):
        raise PlacementError(
            f"strategy='tp' needs a tensor-parallel plan, but {name} has no _tp_plan. Use strategy='pp' or 'sharded'."
        )
    if config is None and not _has_torch_styles(model):
        raise PlacementError(
            f"strategy='tp': the styles in _tp_plan of {name} must be those of torch.distributed.tensor.parallel, as "
            "names of styles are known for transformers models only."
        )
    for field in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, field, None)
        if isinstance(heads, int) and heads % num_devices:
            raise PlacementError(
                f"strategy='tp' over {num_devices} devices: {field}={heads} of {name} does not divide by it. "
                "Use another number of devices, or strategy='pp' or 'sharded'."
            )


def place_sharded(teacher: nn.Module, spec: WorldSpec, rank: int) -> nn.Module:
    """Shard every weight over one process a device."""
    if is_self_placed(teacher):
        raise TeacherError(f"The teacher {type(teacher).__name__} places itself (device_map, quantised): use 'pp'.")
    device = _device(spec, rank)
    if len(spec.devices) == 1:
        return teacher.to(device)
    mesh = init_device_mesh(spec.device_type, (len(spec.devices),))
    return shard_frozen(teacher, mesh, device, spec.wrap_cls)


def _device(spec: WorldSpec, rank: int) -> torch.device:
    return torch.device("cpu") if spec.device_type == "cpu" else torch.device(spec.device_type, spec.devices[rank])


def _tied_head(base: Any) -> bool:
    head = getattr(base, "lm_head", None)
    embeddings = base.get_input_embeddings()
    return head is not None and embeddings is not None and head.weight is embeddings.weight
