"""Trainings of dedicated_script.py under way, for tests that end them."""

import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from support.ranks import marked, started

STARTED = 90  # seconds until the third step, with imports
SCRIPT = Path(__file__).parent / "dedicated_script.py"
TEACHER = "silverspoon_kd.teacher.world.process"


@dataclass
class Training:
    """A training in processes of its own.

    Attributes:
        folder: where it writes.
        log: what it prints.
        launcher: torchrun, or the only student process.
        mark: in the environment of all its processes.
        temporary: their folder for temporary files.
        seen: numbers of all its processes that were seen.
    """

    folder: Path
    log: Path
    launcher: subprocess.Popen
    mark: str
    temporary: Path
    seen: set[int] = field(default_factory=set)

    def alive(self) -> list[psutil.Process]:
        """Return the processes that are there now."""
        found = [process for process in marked(self.mark) if process.status() != psutil.STATUS_ZOMBIE]
        self.seen |= {process.pid for process in found}
        return found

    def teachers(self) -> list[psutil.Process]:
        """Return the teacher's processes."""
        return [process for process in self.alive() if TEACHER in process.cmdline()]

    def student(self, rank: int) -> psutil.Process:
        """Return a student's process, none of its workers."""
        mine = [process for process in self.alive() if process.environ().get("RANK") == str(rank)]
        return next(process for process in mine if SCRIPT.name in str(process.cmdline()) and process.ppid() not in
                    {other.pid for other in mine})  # fmt: skip

    def hanging(self) -> psutil.Process:
        """Wait until a teacher process hangs in its forward, and the students wait for it."""
        self.until(lambda: list(self.folder.glob("hangs-*")), STARTED)
        time.sleep(0.5)
        found = next(self.folder.glob("hangs-*"))
        self.alive()
        return psutil.Process(int(found.name.removeprefix("hangs-")))

    def until(self, condition: Callable[[], Any], seconds: float) -> None:
        """Wait for a condition; the training must not end meanwhile."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.launcher.poll() is None, f"ended too early:\n{self.output()}"
            assert time.monotonic() < deadline, f"not within {seconds} s:\n{self.output()}"
            time.sleep(0.05)

    def ends(self, seconds: float) -> int:
        """Wait for the end of every process and return the exit code."""
        deadline = time.monotonic() + seconds
        try:
            code = self.launcher.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end within {seconds} s:\n{self.output()}") from None
        while left := self.alive():
            assert time.monotonic() < deadline, f"{left} are left after {seconds} s:\n{self.output()}"
            time.sleep(0.05)
        return code

    def output(self) -> str:
        """Return the end of what was printed."""
        return self.log.read_text()[-6000:]

    def errors(self) -> list[str]:
        """Return the error of each rank that raised one, and what caused it."""
        return [path.read_text() for path in sorted(self.folder.glob("error-*"))]

    def told(self, rank: int, pattern: str) -> None:
        """Check that a rank raised an error that matches, or at least logged it before it was stopped.

        A rank that waits for another rank, and not for the teacher, can raise only when the other one has left, and
        torchrun then stops it at the same moment.
        """
        raised = self.folder / f"error-{rank}"
        if raised.exists():
            assert re.match(pattern, raised.read_text()), raised.read_text()
        else:
            text = pattern.split(r"\n")[0].split(": ", 1)[1]
            line = f"The teacher has failed and rank {rank} of its students stops. {text}"
            # The tracebacks of other ranks follow it, and may be longer than the end that is shown.
            assert re.search(line, self.log.read_text()), self.output()

    def losses(self) -> list[list[float]]:
        """Return the losses of each rank that came to its end."""
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("losses-*"))]

    def leftovers(self) -> list[str]:
        """Return the files that it left in the temporary folder and in shared memory."""
        numbers = re.compile(rf"(?<!\d)({'|'.join(map(str, self.seen))})(?!\d)")
        shared = [name for name in os.listdir("/dev/shm") if numbers.search(name) or "silverspoon" in name]
        files = [path.name for path in self.temporary.iterdir()]
        return [*shared, *(name for name in files if not name.startswith("torchinductor_"))]  # torch's empty folder


@contextmanager
def training(folder: Path, ranks: int = 0, **options: Any) -> Iterator[Training]:
    """A training that is under way, on ``ranks`` ranks of torchrun or (0) without; ``options`` as in the script."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log.txt"
    # Not inside the test's folder: the path of a socket in it may have 107 characters at most.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        variables = {"SILVERSPOON_CPU_SLOTS": "6", "TMPDIR": temporary}
        with started(SCRIPT, [folder, json.dumps(options)], log=log, num_ranks=ranks, variables=variables) as running:
            yield Training(folder, log, *running, Path(temporary))
