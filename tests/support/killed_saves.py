"""Kill a run at every point of writing one checkpoint and of deleting the one before, and resume each time.

Run as a program with a folder; prints one JSON line for each kill. Every run is a fork of one warm process.
"""

import hashlib
import itertools
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers.modeling_utils

from silverspoon_kd.training.checkpoint import last_complete
from support.distil import make
from support.tiny import Rows, qwen3

VICTIM, FOLLOWING = "checkpoint-4", "checkpoint-6"
WRITING = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree"}


class Killer:
    """Counts what happens to the files of a run from the victim's first file on, and ends the process at one count.

    When the next checkpoint is begun, the process ends as if all were well: there is nothing more to kill.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.left, self.started = str(folder), count, False
        self.last = ("", "")

    def hit(self, what: str, path: Any) -> None:
        """Count one event."""
        path = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
        if not path.startswith(self.folder):
            return
        if FOLLOWING in path:
            os._exit(0)
        self.started = self.started or VICTIM in path
        if not self.started or (what, path) == self.last:
            return
        self.last = (what, path)
        self.left -= 1
        if self.left == 0:
            Path(self.folder, "killed").write_text(f"{what} {path[len(self.folder) + 1 :]}")
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(self, event: str, arguments: tuple) -> None:
        """See what Python does to files."""
        if event in WRITING and self.left > 0 and (event != "open" or _writes(arguments)):
            self.hit(event, arguments[0])

    def around(self, write: Callable[..., Any], position: int) -> Callable[..., Any]:
        """Wrap a writer that Python does not see: killed before it, or when half of the file is there."""

        def wrapped(*arguments: Any, **kwargs: Any) -> Any:
            path = arguments[position]
            self.hit("before", path)
            result = write(*arguments, **kwargs)
            if self.started and self.left == 1:
                os.truncate(path, os.path.getsize(path) // 2)
            self.hit("half of", path)
            return result

        return wrapped

    def arm(self) -> None:
        """Watch everything from now on."""
        sys.addaudithook(self.audit)
        torch.save = self.around(torch.save, 1)
        safetensors.torch.save_file = self.around(safetensors.torch.save_file, 1)
        transformers.modeling_utils.safe_save_file = self.around(transformers.modeling_utils.safe_save_file, 1)


def _writes(arguments: tuple) -> bool:
    _, mode, flags = arguments
    if mode is None:
        return bool((flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    return any(letter in mode for letter in "wax+")


def run(folder: Path, seed: int, **changes: Any) -> Any:
    """A run of six steps that keeps one checkpoint."""
    values = {
        "max_steps": 6,
        "optim": "adamw_torch",
        "save_strategy": "steps",
        "save_steps": 2,
        "save_total_limit": 1,
        "disable_tqdm": True,
    }
    student = qwen3(seed, layers=2, hidden=16, attention_dropout=0.2)
    rows = {"train_dataset": Rows(n=16)}
    return make("holistic", folder, student=student, teacher=qwen3(0, layers=2), given=rows, **{**values, **changes})


def digest(distiller: Any) -> str:
    """What all trained weights hash to."""
    content = hashlib.sha256()
    for tensor in distiller.root.state_dict().values():
        content.update(tensor.numpy().tobytes())
    return content.hexdigest()


def forked(work: Callable[[], str], answer: Path) -> int:
    """Do some work in a fork and return its exit status; ``answer`` holds what it returned."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            answer.write_text(work())
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def continued(distiller: Any, folder: Path, killer: Killer | None = None) -> str:
    """Train from the last checkpoint in a folder to the end."""
    distiller.args.output_dir = str(folder)
    if killer is not None:
        killer.arm()
    distiller.train(resume_from_checkpoint=True)
    return digest(distiller)


def main(base: Path) -> None:
    """Kill after one event, after two, and so on, until a run ends alive."""
    answer = base / "answer"
    straight = run(base / "straight", 1, save_total_limit=None)
    straight.train()
    wanted = digest(straight)
    victim, survivor = run(base / "none", 8), run(base / "none", 7)
    for count in itertools.count(1):
        folder = base / f"run-{count}"
        shutil.copytree(base / "straight" / "checkpoint-2", folder / "checkpoint-2")
        status = forked(partial(continued, victim, folder, Killer(folder, count)), answer)
        if status == 0:
            return
        if status != -signal.SIGKILL:
            raise SystemExit(f"run {count} ended with {status}")
        complete, _ = last_complete(folder)
        if forked(partial(continued, survivor, folder), answer) != 0:
            raise SystemExit(f"run {count} could not be resumed")
        report = {
            "killed": (folder / "killed").read_text(),
            "complete": complete and complete.name,
            "same": answer.read_text() == wanted,
        }
        print(json.dumps(report), flush=True)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
