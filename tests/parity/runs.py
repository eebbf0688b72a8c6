"""Run a case, and keep what the tests compare."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from parity.cases import Case, Collate, Layout, ParityRows, build_student, build_teacher
from silverspoon_kd import BlockwiseDistiller, HolisticDistiller, ResponseBasedDistiller, create_alignments
from silverspoon_kd.errors import TrainingError
from support.tiny import arguments


@dataclasses.dataclass
class Outcome:
    """What a run left behind, on this rank.

    Attributes:
        before: parameters of the root (student and projectors) before training.
        after: the same afterwards.
        buffers: running statistics of the student afterwards.
        losses: the logged losses of each step.
        wrapped: class of the module that the Trainer trained.
        static_graph: whether DDP was told that the graph never changes.
        refusal: the error of a step that goes round the wrapper; "" on one process, where there is nothing to go round.
        optimized: names of the parameters in the optimizer.
        teacher: facts about the teacher.
    """

    before: dict[str, Tensor]
    after: dict[str, Tensor]
    buffers: dict[str, Tensor]
    losses: list[dict[str, float]]
    wrapped: str
    static_graph: bool
    refusal: str
    optimized: list[str]
    teacher: dict[str, Any]


class OwnDraws(TrainerCallback):
    """Give each rank random numbers of its own in each step, as dropout on real data would have."""

    def on_step_begin(self, args, state, control, **kwargs):
        torch.manual_seed(1000 * args.process_index + state.global_step)


def build(
    case: Case,
    layout: Layout,
    folder: Path,
    *,
    student: nn.Module | None = None,
    teacher: nn.Module | None = None,
    collate: Collate = Collate(),  # noqa: B008
    rows: Any = None,
    alignments: Any = None,
    loss_arguments: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """Return the distiller of a case; ``changes`` go to its arguments."""
    student = build_student(case) if student is None else student
    teacher = build_teacher(case) if teacher is None else teacher
    values = {
        "per_device_train_batch_size": layout.batch,
        "gradient_accumulation_steps": layout.accumulation,
        "learning_rate": case.learning_rate,
        "alpha": case.alpha,
        "max_steps": case.steps,
        "train_sampling_strategy": "sequential",
        "report_to": "none",
        **case.arguments,
        **changes,
    }
    num_rows = layout.batch * layout.accumulation * layout.ranks * case.steps
    common = {
        "args": arguments(folder, **values),
        "train_dataset": ParityRows(num_rows, equal=case.equal_rows) if rows is None else rows,
        "data_collator": collate,
    }
    if case.distiller == "response":
        return ResponseBasedDistiller(student, teacher, soft_loss_fn_kwargs=loss_arguments, **common)
    if alignments is None:
        alignments = create_alignments(
            teacher, student, case.modules, output_selector_index=0, loss_weight=case.loss_weight
        )
    kinds = {"holistic": HolisticDistiller, "blockwise": BlockwiseDistiller}
    return kinds[case.distiller](teacher, alignments, student_model=student, **common)


def train(distiller: Any) -> Outcome:
    """Train and look at everything."""
    teacher = distiller.teacher
    frozen = {name: value.clone() for name, value in teacher.state_dict().items()}
    before = _copies(distiller.root.named_parameters())
    names = {id(parameter): name for name, parameter in distiller.root.named_parameters()}
    distiller.train()
    left = teacher.state_dict()
    return Outcome(
        before=before,
        after=_copies(distiller.root.named_parameters()),
        buffers=_copies(distiller.student_model.named_buffers()),
        losses=[
            {key: value for key, value in entry.items() if key.startswith("loss")}
            for entry in distiller.state.log_history
            if "loss" in entry
        ],
        wrapped=type(distiller.model_wrapped).__name__,
        static_graph=bool(getattr(distiller.model_wrapped, "static_graph", False)),
        refusal=_refusal(distiller) if distiller.args.world_size > 1 else "",
        optimized=[names[id(each)] for group in distiller.optimizer.param_groups for each in group["params"]],
        teacher={
            "class": type(distiller._executor.teacher).__name__,
            "unchanged": all(torch.equal(frozen[name], left[name]) for name in frozen),
            "trainable": [name for name, parameter in teacher.named_parameters() if parameter.requires_grad],
            "gradients": [name for name, parameter in teacher.named_parameters() if parameter.grad is not None],
        },
    )


def run(case: Case, layout: Layout, folder: Path, **options: Any) -> Outcome:
    """Build and train."""
    distiller = build(case, layout, folder, **options)
    if case.student == "layer_drop":
        distiller.add_callback(OwnDraws())
    return train(distiller)


def size(tensors: dict[str, Tensor]) -> float:
    """Return the 2-norm of all values together."""
    return sum(float((tensor.double() ** 2).sum()) for tensor in tensors.values()) ** 0.5


def relative(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the relative distance of two sets of weights."""
    assert one.keys() == other.keys()
    return size({name: one[name].double() - other[name].double() for name in one}) / size(other)


def moved(outcome: Outcome) -> float:
    """Return how far the weights moved, relative to their size."""
    return relative(outcome.after, outcome.before)


def identical(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Return the names whose tensors are not bit-equal."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def _refusal(distiller: Any) -> str:
    batch = distiller.data_collator([distiller.train_dataset[0]])
    try:
        distiller.compute_loss(distiller.root.train(), batch)
    except TrainingError as error:
        return str(error)
    return ""


def _copies(named: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named}
