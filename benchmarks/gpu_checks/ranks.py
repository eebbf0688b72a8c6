"""Runs that torchrun starts with one rank, so that the collectives of the device are really called."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from gpu_checks.rows import Checks, Found, Setting, Skipped
from gpu_checks.runs import THREE, distiller_of, error_of, train
from parity.cases import Case, build_teacher
from silverspoon_kd.distributed import Plan
from silverspoon_kd.errors import ConfigurationError
from silverspoon_kd.teacher.sharding import shard_frozen


def checks(setting: Setting) -> Checks:
    """Return the checks of this file; FSDP comes last, as it leaves settings in the environment."""
    cases = THREE[:1] if setting.quick else THREE
    for case in cases:
        yield f"ddp {case.name}", partial(ddp, setting, case)
    yield "sharded teacher, one rank", partial(sharded_teacher, setting, THREE[0])
    for case in cases:
        yield f"fsdp {case.name}", partial(fsdp, setting, case)


def ddp(setting: Setting, case: Case) -> Found:
    """The wrapped student learns what the reference does, with the backend of the device."""
    distiller = distiller_of(setting, case)
    error = error_of(train(distiller), case)
    wrapper = type(distiller.model_wrapped).__name__
    if wrapper != "DistributedDataParallel":
        raise AssertionError(f"the student was trained as {wrapper}")
    return Found(error, setting.exact, _backend(setting))


def fsdp(setting: Setting, case: Case) -> Found:
    """The same where the student's weights are sharded, over the only rank."""
    try:
        with one_rank_is_enough():
            distiller = distiller_of(setting, case, fsdp="full_shard")
    except ConfigurationError as reason:
        raise Skipped(str(reason)) from None
    error = error_of(train(distiller), case)
    plain = [name for name, each in distiller.root.student.named_parameters() if not isinstance(each, DTensor)]
    if plain:
        raise AssertionError(f"{len(plain)} parameters are not sharded, such as {plain[0]!r}")
    return Found(error, setting.exact, _backend(setting))


@contextmanager
def one_rank_is_enough() -> Iterator[None]:
    """Let a plan run that is refused since there is nobody to share with; for this check alone."""
    given = Plan.require_runnable
    Plan.require_runnable = lambda plan: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Plan.require_runnable = given  # type: ignore[method-assign]


@torch.no_grad()
def sharded_teacher(setting: Setting, case: Case) -> Found:
    """A teacher under FSDP2 gives the logits of a plain one."""
    ids = torch.arange(1, 49, device=setting.device).reshape(4, 12)
    teacher = build_teacher(case).eval().requires_grad_(False).to(setting.device)
    expected = teacher(ids).logits
    sharded = shard_frozen(teacher, init_device_mesh(setting.device, (1,)), torch.device(setting.device))
    if not all(isinstance(parameter, DTensor) for parameter in sharded.parameters()):
        raise AssertionError("not all of the teacher's parameters are sharded")
    difference = (sharded(ids).logits - expected).abs().max() / expected.abs().max()
    return Found(float(difference), setting.exact, _backend(setting))


def _backend(setting: Setting) -> str:
    found, wanted = dist.get_backend(), dist.get_default_backend_for_device(setting.device)
    if found not in wanted:
        raise AssertionError(f"the ranks talk through {found}, not {wanted}")
    return found
