"""Run many cases on this rank and write each outcome: ``torchrun rank_program.py FOLDER``."""

import dataclasses
import gc
import sys
import time
from pathlib import Path

import torch
import transformers

from parity.cases import RANK_RUNS, Case, Layout
from parity.runs import Outcome, run


def path_of(folder: Path, case: Case, layout: Layout, rank: int) -> Path:
    """Return where the outcome of a run lies."""
    return folder / f"{case.name}@{layout.name}.rank{rank}.pt"


def read(folder: Path, case: Case, layout: Layout, rank: int) -> Outcome:
    """Read an outcome."""
    return Outcome(**torch.load(path_of(folder, case, layout, rank), weights_only=True))


def main(folder: Path) -> None:
    transformers.logging.set_verbosity_error()
    gc.freeze()  # every training run collects garbage, which takes longer than its steps
    for case, layout in RANK_RUNS:
        start = time.perf_counter()
        outcome = run(case, layout, folder / "runs")
        rank = torch.distributed.get_rank()
        torch.save(dataclasses.asdict(outcome), path_of(folder, case, layout, rank))
        print(f"rank {rank}: {case.name}@{layout.name} {time.perf_counter() - start:.1f} s", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
