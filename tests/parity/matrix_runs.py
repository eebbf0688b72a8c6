"""Every way to train a student with every place for its teacher: ``torchrun matrix_runs.py FOLDER MODE [ROW ...]``."""

import dataclasses
import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from parity.cases import Case, Collate, Layout, ParityRows, build_student
from parity.runs import build
from silverspoon_kd import create_alignments
from silverspoon_kd.distributed import TeacherPlacement, setup_split_gpu
from support.tiny import qwen3

RANKS, SLOTS, TEACHER_DEVICES = 2, 4, 2
BATCH, ACCUMULATION, STEPS = 2, 2, 4
RATE = {"response": 1.0, "holistic": 0.1, "blockwise": 0.5}
MODES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"fsdp": "full_shard"},
    **{
        f"zero{stage}": {"deepspeed": {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}}
        for stage in range(4)
    },
}
PLACEMENTS = ("replicated", "sharded", "dedicated-pp", "dedicated-tp", "dedicated-sharded")
DISTILLERS = ("response", "holistic", "blockwise")
WHOLE_TABLE = os.environ.get("SILVERSPOON_PARITY") == "all"


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the table."""

    distiller: str
    mode: str
    placement: str

    @property
    def name(self) -> str:
        """For test ids and files."""
        return f"{self.distiller}-{self.mode}-{self.placement}"

    @property
    def alpha(self) -> float:
        """Share of the student's own loss: that of logits is then of one pass with the divergence."""
        sharded = self.mode in ("fsdp", "zero3")
        return 0.25 if self.distiller == "holistic" or (self.distiller == "response" and sharded) else 0.0

    @property
    def resumes(self) -> bool:
        """Whether it is also saved and resumed: starting a dedicated teacher again takes long."""
        return WHOLE_TABLE or not self.placement.startswith("dedicated-")

    @property
    def exact(self) -> float:
        """The largest relative difference: tensor parallelism and ZeRO sum in another order."""
        return 1e-5 if "tp" in self.placement or "zero" in self.mode else 1e-6


TABLE = [Row(*values) for mode in MODES for values in [(d, mode, p) for p in PLACEMENTS for d in DISTILLERS]]
# A world of its own knows nothing of the student's engine, and takes seconds to start: one for each ZeRO stage.
WORLDS = {"zero1": "dedicated-tp", "zero2": "dedicated-sharded", "zero3": "dedicated-pp"}
# Every other pair of values at least once, but for stage 0, which test_deepspeed.py compares with the others.
COVER = [
    Row(DISTILLERS[(i + j) % len(DISTILLERS)], mode, placement)
    for i, mode in enumerate(MODES)
    for j, placement in enumerate(PLACEMENTS)
    if mode != "zero0" and (not placement.startswith("dedicated") or WORLDS.get(mode, placement) == placement)
]


@dataclasses.dataclass
class Found:
    """What a run left behind on this rank, gathered where it was sharded.

    Attributes:
        before: parameters of the root before training.
        after: the same afterwards.
        resumed: the same of a run that was saved after two steps and went on from there; empty if not tried.
        logs: losses, rates and gradient norms of each step.
        wrapped: class of the module that was trained.
        shares: parameters of which this rank holds a part only.
        teacher_unchanged: None for one that this process does not hold.
    """

    before: dict[str, Tensor]
    after: dict[str, Tensor]
    resumed: dict[str, Tensor]
    logs: list[dict[str, float]]
    wrapped: str
    shares: list[str]
    teacher_unchanged: bool | None


def distiller_of(row: Row, folder: Path, batch: int, collate: Collate, **changes: Any) -> Any:
    """Return the distiller of a row: a narrow student, two alignments with settings of their own, ragged batches."""
    case = Case(row.name, row.distiller, "narrow", learning_rate=RATE[row.distiller], loss_weight=4.0)
    teacher, student = qwen3(seed=1, layers=3, initializer_range=0.1), build_student(case)
    alignments = None
    if row.distiller != "response":
        slow = {"learning_rate": 0.3 * case.learning_rate, "max_grad_norm": 0.05}
        alignments = _aligned(teacher, student, 0, case, **slow) + _aligned(teacher, student, 2, case)
    return build(
        case,
        Layout(batch, ACCUMULATION),
        folder,
        student=student,
        teacher=teacher,
        alignments=alignments,
        rows=ParityRows(BATCH * RANKS * ACCUMULATION * STEPS - 1),  # the last batch of the last rank is a short one
        collate=collate,
        **{
            "alpha": row.alpha,
            "max_steps": STEPS,
            "max_grad_norm": 0.5,
            "lr_scheduler_type": "linear",
            "accelerator_config": {"even_batches": False},
            **changes,
        },
    )


def run_reference(row: Row, folder: Path) -> Found:
    """Train in this process, without anything distributed and with whole logits."""
    return _train(distiller_of(row, folder, BATCH * RANKS, Collate(), fused_losses=False))


def run_here(row: Row, folder: Path) -> Found:
    """Train on this rank; the batches of the ranks differ in length and, by rows that are all padding, in size."""
    rank = int(os.environ["RANK"])
    placement: Any = row.placement
    if placement.startswith("dedicated-"):
        strategy = placement.removeprefix("dedicated-")
        placement = TeacherPlacement(list(range(SLOTS - TEACHER_DEVICES, SLOTS)), strategy, device_type="cpu")
        setup_split_gpu(placement)
    own = {"teacher_placement": placement, "save_strategy": "steps", "save_steps": STEPS // 2, **MODES[row.mode]}
    collate = Collate(right=rank, empty_rows=rank)
    found = _train(distiller_of(row, folder, BATCH, collate, **own))
    if not row.resumes:
        return found
    second = distiller_of(row, folder, BATCH, collate, **own)
    second.train(resume_from_checkpoint=str(folder / f"checkpoint-{STEPS // 2}"))
    second._executor.close()
    return dataclasses.replace(found, resumed=_whole(second.root))


def path_of(folder: Path, row: Row, rank: int) -> Path:
    """Return where the outcome of a row lies."""
    return folder / f"{row.name}.rank{rank}.pt"


def finished(folder: Path, row: Row) -> bool:
    """Tell whether all ranks have written the outcome of a row."""
    return all(path_of(folder, row, rank).exists() for rank in range(RANKS))


def read(folder: Path, row: Row) -> list[Found]:
    """Return the outcomes of a row on all its ranks."""
    return [Found(**torch.load(path_of(folder, row, rank), weights_only=True)) for rank in range(RANKS)]


def _aligned(teacher: nn.Module, student: nn.Module, layer: int, case: Case, **settings: Any) -> Any:
    pattern = rf"model\.layers\.{layer}"
    return create_alignments(
        teacher, student, pattern, output_selector_index=0, loss_weight=case.loss_weight, **settings
    )


def _train(distiller: Any) -> Found:
    before, teacher = _whole(distiller.root), distiller.teacher
    kept = None if teacher is None else _whole(teacher)
    distiller.train()
    distiller._executor.close()
    return Found(
        before=before,
        after=_whole(distiller.root),
        resumed={},
        logs=[entry for entry in distiller.state.log_history if "loss" in entry],
        wrapped=type(distiller.model_wrapped).__name__,
        shares=[name for name, parameter in distiller.root.named_parameters() if _is_share(parameter)],
        teacher_unchanged=None if kept is None else all(map(torch.equal, kept.values(), _whole(teacher).values())),
    )


def _is_share(parameter: Any) -> bool:
    if hasattr(parameter, "ds_shape"):
        return parameter.numel() < parameter.ds_numel
    return hasattr(parameter, "to_local") and parameter.to_local().numel() < parameter.numel()


def _whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: _full(parameter).detach().clone() for name, parameter in model.named_parameters()}


def _full(parameter: Any) -> Tensor:
    if hasattr(parameter, "ds_shape"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.data.clone()
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def main(folder: Path, mode: str, names: list[str]) -> None:
    """Make the rows of a mode, one after the other."""
    transformers.logging.set_verbosity_error()
    gc.freeze()  # every training run collects garbage, which takes longer than its steps
    rank = int(os.environ["RANK"])
    for row in TABLE:
        if row.mode == mode and (not names or row.name in names):
            start = time.perf_counter()
            written = folder / f"{mode}.rank{rank}.part"
            torch.save(dataclasses.asdict(run_here(row, folder / "runs" / row.name)), written)
            written.rename(path_of(folder, row, rank))
            print(f"rank {rank}: {row.name} {time.perf_counter() - start:.1f} s", flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
