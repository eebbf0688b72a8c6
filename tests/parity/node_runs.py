"""What each rank of two nodes runs: ``torchrun --nnodes=2 ... node_runs.py FOLDER``, started once for each node.

At the end they train once more, and the second node loses its teacher in the middle of that.
"""

import dataclasses
import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from transformers import TrainerCallback

from parity.placement_runs import Placed, PlacedRun, distiller_here, trained

NODES, PER_NODE = 2, 2
RUNS = [PlacedRun("holistic", "pp", NODES * PER_NODE, 1), PlacedRun("response", "sharded", NODES * PER_NODE, 2)]
RANK = int(os.environ.get("RANK", "0"))


@dataclasses.dataclass
class OnNode:
    """What a run left behind on a rank, and what the rank said of itself."""

    placed: Placed
    plan: dict[str, Any]
    local_rank: int
    num_teacher_processes: int


def read(folder: Path, run: PlacedRun, rank: int) -> OnNode:
    """Return the outcome of a run on a rank."""
    values = torch.load(folder / f"{run.name}.rank{rank}.pt", weights_only=True)
    return OnNode(**{**values, "placed": Placed(**values["placed"])})


def error(folder: Path, rank: int) -> str:
    """Return how a rank ended when the second node lost its teacher; "" where its launcher was faster."""
    path = folder / f"error.rank{rank}.json"
    return json.loads(path.read_text()) if path.exists() else ""


class LoseTeacher(TrainerCallback):
    """Kill one of this node's teacher processes after the first step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            _teachers()[0].kill()


def main(folder: Path) -> None:
    """Make the runs one after the other."""
    transformers.logging.set_verbosity_error()
    gc.freeze()  # every training run collects garbage, which takes longer than its steps
    for run in RUNS:
        distiller = distiller_here(run, folder / "runs")
        plan, found = distiller.plan.to_dict(), len(_teachers())
        outcome = OnNode(trained(distiller), plan, distiller.args.local_process_index, found)
        torch.save(dataclasses.asdict(outcome), folder / f"{run.name}.rank{RANK}.pt")
        if run is not RUNS[-1]:
            distiller._executor.close()
    if RANK == PER_NODE:
        distiller.add_callback(LoseTeacher())
    try:
        distiller.train()
    except Exception as failure:
        (folder / f"error.rank{RANK}.json").write_text(json.dumps(f"{type(failure).__name__}: {failure}"))
        raise


def _teachers() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if "silverspoon_kd.teacher.world.process" in each.cmdline()]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
