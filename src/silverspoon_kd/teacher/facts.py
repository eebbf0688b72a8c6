"""What has to be known of a teacher before a student can be prepared for it."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from silverspoon_kd.capture import Capture, InputView, Tap, Trace, base_of
from silverspoon_kd.capture.head_form import HeadForm, head_form
from silverspoon_kd.capture.probe import probe
from silverspoon_kd.distributed.plan import DeviceMemory
from silverspoon_kd.teacher.head import Head, head_of
from silverspoon_kd.teacher.world.parts import doubled

logger = logging.getLogger(__name__)


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
        main_input: name of the input that tells the number of rows, None where there is none.
        head: its output head, None where there is none or where it is in other processes that were not asked for it.
        divides: whether a batch may be divided by rows: every activation then has rows too.
        head_form: how its logits are made of what its head takes in, which is given in their place; why that is not
            possible; None where nobody asked.
    """

    values: Mapping[Tap, Tensor]
    columns: tuple[str, ...] | None
    vocab_size: int | None
    class_name: str
    shifts_labels: bool
    main_input: str | None
    head: Head | None
    divides: bool = False
    memory: tuple[DeviceMemory, ...] = ()
    head_form: HeadForm | str | None = None


def facts_of(
    teacher: nn.Module,
    taps: Sequence[Tap],
    trace: Trace,
    inputs: Mapping[str, Any],
    *,
    without_logits: str | None = None,
) -> TeacherFacts:
    """Find the facts by one forward on fake tensors.

    Args:
        teacher: frozen.
        taps: activations that will be taken.
        trace: filled in.
        inputs: a tiny batch as the teacher's forward takes it.
        without_logits: a module whose output is logits ("" for the model): where they can be made of what the head
            takes in, that is taken instead.
    """
    form = None if without_logits is None else head_form(teacher, inputs)
    if isinstance(form, HeadForm) and without_logits not in ("", form.module):
        form = f"{without_logits!r} is not its output head"
    taps = taps_in_effect(taps, form)

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
        main_input=main_input_of(teacher),
        head=head_of(teacher),
        head_form=form,
    )


def taps_in_effect(taps: Sequence[Tap], form: HeadForm | str | None) -> list[Tap]:
    """Return what is taken of a teacher that was asked for ``taps``: what its head takes in in place of logits."""
    if not isinstance(form, HeadForm):
        return list(taps)
    logits = ("", form.module)
    return [Tap(form.module, "input") if tap.side == "output" and tap.module in logits else tap for tap in taps]


def divides_by_rows(teacher: nn.Module, facts: TeacherFacts, inputs: Mapping[str, Any]) -> bool:
    """Tell whether every activation has its rows, and nothing else of the batch, along its first dimension.

    Found by a second forward on fake tensors with each row twice: position embeddings that all rows share, or the
    similarities of all rows with each other, do not become twice as long.

    Args:
        teacher: frozen.
        facts: of the same ``inputs``.
        inputs: a tiny batch as the teacher's forward takes it.
    """
    more = doubled(inputs, facts.main_input)
    if more is None:
        return False
    try:
        values = facts_of(teacher, list(facts.values), Trace(), more).values
    except Exception as error:
        logger.debug("A batch with each row twice is not possible for %s: %s", facts.class_name, error)
        return False
    return all(
        value.dim() > 0 and values[tap].shape == (2 * len(value), *value.shape[1:])
        for tap, value in facts.values.items()
    )


def main_input_of(teacher: nn.Module) -> str | None:
    """Return the name of a transformers model's main input."""
    name = getattr(base_of(teacher), "main_input_name", None)
    return name if isinstance(name, str) else None
