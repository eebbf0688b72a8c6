"""The places for the teacher that are compared: ``torchrun placement_runs.py FOLDER`` runs those of its world size."""

import dataclasses
import gc
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from parity.cases import PARITY_CASES, Case, Collate, Layout, ParityRows, build_student
from parity.matrix_runs import WHOLE_TABLE
from parity.runs import build
from silverspoon_kd import create_alignments
from silverspoon_kd.distributed import TeacherPlacement, setup_split_gpu
from support.tiny import qwen3

SLOTS = 6
BATCH, STEPS = 2, 3
STRATEGIES = ("pp", "tp", "sharded")
# The students are narrower than the teacher; one run has the student's own loss too.
CASES = {
    case.distiller: case
    for case in PARITY_CASES
    if case.name in {"response-narrow", "holistic-narrow-task", "blockwise-narrow"}
}


@dataclasses.dataclass(frozen=True)
class PlacedRun:
    """One training run with a teacher somewhere.

    Attributes:
        distiller: of CASES.
        placement: "replicated", "sharded", or with devices a strategy.
        ranks: of the student.
        devices: of the teacher's own; 0: it lives beside the student.
        lens: the losses need the teacher's head, and a teacher of its own devices is built by its own processes.
    """

    distiller: str
    placement: str
    ranks: int
    devices: int = 0
    lens: bool = False

    @property
    def name(self) -> str:
        """For test ids and files."""
        where = f"teacher_{self.placement}-{self.devices}" if self.devices else self.placement
        return f"{self.distiller}{'-lens' if self.lens else ''}-{where}-ranks-{self.ranks}"

    @property
    def case(self) -> Case:
        """What is trained."""
        return CASES[self.distiller]


@dataclasses.dataclass
class Placed:
    """What a run left behind on this rank: parameters before and after, and the logged losses of each step."""

    before: dict[str, Tensor]
    after: dict[str, Tensor]
    losses: list[dict[str, float]]


# Every distiller with every placement on one rank (on two: matrix_runs.py), and each strategy with other numbers.
MATRIX = [
    PlacedRun(distiller, placement, 1, devices)
    for distiller in CASES
    for placement, devices in [("replicated", 0), *[(strategy, 2) for strategy in STRATEGIES]]
]
NUMBERS = [
    PlacedRun(distiller, strategy, ranks, devices)
    for ranks, devices in [(1, 1), (1, 3), (2, 1), (2, 3), (3, 1)]
    for strategy, distiller in zip(STRATEGIES, ("response", "holistic", "blockwise"), strict=True)
]
LENS = [
    PlacedRun("holistic", placement, ranks, devices, lens=True)
    for placement, ranks, devices in [
        ("replicated", 1, 0), ("sharded", 2, 0), ("pp", 2, 1), ("tp", 2, 2), ("sharded", 2, 2)
    ]
]  # fmt: skip
TABLE = [*MATRIX, *NUMBERS, *LENS]
# A teacher's processes take seconds to start: by default each distiller, placement and pair of numbers once or twice.
COVER = [
    PlacedRun("holistic", "replicated", 1),
    PlacedRun("holistic", "pp", 1, 2),
    PlacedRun("blockwise", "tp", 1, 2),
    PlacedRun("blockwise", "sharded", 1, 1),
    PlacedRun("response", "pp", 1, 3),
    PlacedRun("holistic", "tp", 2, 1),
    PlacedRun("blockwise", "sharded", 2, 3),
    PlacedRun("response", "pp", 3, 1),
    *LENS[1::3],
]
RUNS = sorted(TABLE if WHOLE_TABLE else COVER, key=lambda run: run.ranks)


def run_here(run: PlacedRun, folder: Path) -> Placed:
    """Train on this rank."""
    return _closed(distiller_here(run, folder))


def distiller_here(run: PlacedRun, folder: Path) -> Any:
    """Make the distiller of this rank: batches of the ranks differ in length and, by rows of padding, in size."""
    rank = int(os.environ["RANK"])
    placement: Any = run.placement
    if run.devices:
        placement = TeacherPlacement(list(range(SLOTS - run.devices, SLOTS)), run.placement, device_type="cpu")
        setup_split_gpu(placement)
    return _distiller(run, folder, BATCH, Collate(right=rank, empty_rows=rank), teacher_placement=placement)


def run_reference(run: PlacedRun, folder: Path) -> Placed:
    """Train in this process with the teacher in it and all rows of a step in one batch."""
    return _closed(_distiller(run, folder, BATCH * run.ranks, Collate()))


def path_of(folder: Path, run: PlacedRun, rank: int) -> Path:
    """Return where the outcome of a run lies."""
    return folder / f"{run.name}.rank{rank}.pt"


def finished(folder: Path, run: PlacedRun) -> bool:
    """Tell whether all ranks have written the outcome of a run."""
    return all(path_of(folder, run, rank).exists() for rank in range(run.ranks))


def read(folder: Path, run: PlacedRun) -> list[Placed]:
    """Return the outcomes of a run on all its ranks."""
    return [Placed(**torch.load(path_of(folder, run, rank), weights_only=True)) for rank in range(run.ranks)]


def trained(distiller: Any) -> Placed:
    """Train and keep what is compared."""
    before = _copies(distiller.root)
    distiller.train()
    logs = [entry for entry in distiller.state.log_history if "loss" in entry]
    losses = [{key: value for key, value in entry.items() if key.startswith("loss")} for entry in logs]
    return Placed(before, _copies(distiller.root), losses)


def _closed(distiller: Any) -> Placed:
    outcome = trained(distiller)
    distiller._executor.close()
    return outcome


def _distiller(run: PlacedRun, folder: Path, batch: int, collate: Collate, **changes: Any) -> Any:
    given: dict[str, Any] = {"teacher": _teacher(run)}
    if run.lens:
        student = build_student(run.case)
        alignments = create_alignments(given["teacher"], student, run.case.modules, "logit_lens_kl")
        given |= {"student": student, "alignments": alignments}
        if run.devices and "teacher_placement" in changes:
            given["teacher"] = partial(_teacher, run)
    return build(
        run.case,
        Layout(batch),
        folder,
        **given,
        rows=ParityRows(BATCH * run.ranks * STEPS - 1),  # the last batch of the last rank is a short one
        collate=collate,
        max_steps=STEPS,
        accelerator_config={"even_batches": False},
        **changes,
    )


def _teacher(run: PlacedRun) -> nn.Module:
    """Return the same teacher in every run of the same numbers; one whose heads can be divided by three for three."""
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3} if run.devices == 3 else {}
    return qwen3(seed=1, layers=3, initializer_range=0.1, **heads)


def _copies(root: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in root.named_parameters()}


def main(folder: Path) -> None:
    """Make the runs of this number of ranks, one after the other."""
    transformers.logging.set_verbosity_error()
    gc.freeze()  # every training run collects garbage, which takes longer than its steps
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for run in RUNS:
        if run.ranks == ranks:
            start = time.perf_counter()
            written = folder / f"rank{rank}.part"
            torch.save(dataclasses.asdict(run_here(run, folder / "runs")), written)
            written.rename(path_of(folder, run, rank))
            print(f"rank {rank}: {run.name} {time.perf_counter() - start:.1f} s", flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
