"""A teacher in the student's own process: fp32 against float64 by hand, mixed precision, overlap, LoRA."""

import math
import os
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from gpu_checks.rows import Checks, Found, Setting, Skipped
from gpu_checks.runs import THREE, Trained, distiller_of, error_of, loss_error, train
from parity.by_reference import by_hand
from parity.cases import MOVED, PARITY_CASES, Case, build_student
from parity.runs import relative


def checks(setting: Setting) -> Checks:
    """Return the checks of this file."""
    few = THREE[:1] if setting.quick else THREE
    for case in THREE if setting.quick else PARITY_CASES:
        yield f"fp32 {case.name}", partial(fp32, setting, case)
    for case in few:
        yield f"bf16 {case.name}", partial(mixed, setting, case, "bf16")
        yield f"fp16 {case.name}", partial(mixed, setting, case, "fp16")
    for case in few:
        yield f"overlap {case.name}", partial(overlap, setting, case)
    yield "LoRA student", partial(lora, setting, THREE[0])


def fp32(setting: Setting, case: Case) -> Found:
    """Losses and weights of a training are those of the same written by hand in float64."""
    return Found(error_of(train(distiller_of(setting, case)), case), setting.exact)


def mixed(setting: Setting, case: Case, name: str) -> Found:
    """The losses are near those of float64, and not so near that mixed precision was not in use."""
    if name == "fp16" and setting.device == "cpu":
        raise Skipped("fp16 needs an accelerator")
    trained = train(distiller_of(setting, case, **{name: True}))
    if not all(math.isfinite(value) for step in trained.losses for value in step.values()):
        raise AssertionError(f"losses are not finite: {trained.losses}")
    result = by_hand(case, trained.before)
    # The scale of fp16 may have to come down first, so that the first steps change nothing.
    steps = 1 if name == "fp16" else len(trained.losses)
    result.losses = result.losses[:steps]
    error = loss_error(trained.losses[:steps], result)
    if error < 1e-5:
        raise AssertionError(f"{name}=True made no difference")
    return Found(error, 0.03, "losses only")


class Order(TrainerCallback):
    """Notes when the teacher runs: after how many optimizer steps, on which stream, in which thread."""

    def __init__(self, teacher: nn.Module, device: str) -> None:
        self._device, self._steps = device, 0
        self.home = self._place()
        self.forwards: list[tuple[int, Any]] = []
        teacher.register_forward_pre_hook(self._note)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._steps += 1

    @property
    def apart(self) -> bool:
        """Whether a forward ran ahead of its step, or beside the student."""
        ahead = any(number > steps for number, (steps, _) in enumerate(self.forwards))
        return ahead or any(place != self.home for _, place in self.forwards)

    def _note(self, module: nn.Module, args: Any) -> None:
        self.forwards.append((self._steps, self._place()))

    def _place(self) -> Any:
        stream = None if self._device == "cpu" else torch.accelerator.current_stream()
        return threading.get_ident(), stream


def overlap(setting: Setting, case: Case) -> Found:
    """With overlap forced on one device everything is bit-identical to overlap off, if two runs of that are."""
    off, again = (train(distiller_of(setting, case, overlap_teacher_forward=False)) for _ in range(2))
    distiller = distiller_of(setting, case, overlap_teacher_forward=True, teacher_lookahead=1)
    order = Order(distiller.teacher, setting.device)
    distiller.add_callback(order)
    on = train(distiller)
    if not order.apart:
        raise AssertionError("the teacher ran in line with the student's steps")
    exact = _distance(again, off) == 0
    note = "bit-identical" if exact else "two runs without overlap are not bit-identical here"
    return Found(_distance(on, off), 0 if exact else setting.exact, note)


def _distance(one: Trained, other: Trained) -> float:
    """The largest relative difference of the weights, or of a loss."""
    pairs = [
        (mine[name], theirs[name]) for mine, theirs in zip(one.losses, other.losses, strict=True) for name in theirs
    ]
    return max(relative(one.after, other.after), *(abs(mine - theirs) / abs(theirs) for mine, theirs in pairs))


def lora(setting: Setting, case: Case) -> Found:
    """A LoRA student learns the same on the device and on the CPU."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise Skipped("peft is not installed") from None

    def student() -> nn.Module:
        model = build_student(case)
        return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))  # type: ignore[arg-type]

    here, variables = train(distiller_of(setting, case, student=student())), set(os.environ)
    there = train(distiller_of(replace(setting, device="cpu"), case, student=student()))
    for name in set(os.environ) - variables:
        del os.environ[name]  # accelerate would go on using the CPU
    before, own, other = (_adapters(each) for each in (here.before, here.after, there.after))
    if relative(own, before) < MOVED:
        raise AssertionError("the adapters have hardly moved")
    return Found(relative(own, other), 10 * setting.exact)


def _adapters(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if "lora_" in name}
