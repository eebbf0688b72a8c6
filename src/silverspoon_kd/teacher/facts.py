"""What has to be known of a teacher before a student can be prepared for it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from silverspoon_kd.capture import Capture, InputView, Tap, Trace, base_of
from silverspoon_kd.capture.probe import probe
from silverspoon_kd.distributed.plan import DeviceMemory


@dataclass(frozen=True)
class TeacherFacts:
    """A teacher without its weights.

    Attributes:
        values: tensors without data that have the shape and dtype of each activation for a tiny batch.
        columns: what its forward takes; None: everything.
        vocab_size: of its config, None where there is none.
        class_name: of the model.
        shifts_labels: whether it needs the labels, to make the ids of its decoder of them.
        memory: what it will need on each device; its signals are those of one batch.
    """

    values: Mapping[Tap, Tensor]
    columns: tuple[str, ...] | None
    vocab_size: int | None
    class_name: str
    shifts_labels: bool
    memory: tuple[DeviceMemory, ...] = ()


def facts_of(teacher: nn.Module, taps: Sequence[Tap], trace: Trace, inputs: Mapping[str, Any]) -> TeacherFacts:
    """Find the facts by one forward on fake tensors.

    Args:
        teacher: frozen.
        taps: activations that will be taken.
        trace: filled in.
        inputs: a tiny batch as the teacher's forward takes it.
    """

    def call(forward: Callable[[], Any]) -> dict[Tap, Tensor]:
        capture = Capture(teacher, taps, trace)
        with torch.no_grad():
            capture.run(forward, may_stop=False)
        return capture.values

    values, _ = probe(teacher, inputs, call)
    view = InputView(teacher, "teacher")
    size = getattr(getattr(base_of(teacher), "config", None), "vocab_size", None)
    return TeacherFacts(
        values=values,
        columns=None if view.takes_everything else tuple(view.names),
        vocab_size=size if isinstance(size, int) else None,
        class_name=type(base_of(teacher)).__name__,
        shifts_labels=view.shifts_labels,
    )
