"""Start ranks for a test, on CPU, with a hard time limit and nothing left behind."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

GRACE = 5  # seconds between asking processes to end and making them
MARK = "SILVERSPOON_TEST_RUN"


def torchrun(
    program: Path,
    arguments: Sequence[object],
    *,
    log: Path,
    num_ranks: int = 2,
    timeout: float = 120,
    fork: bool = False,
) -> None:
    """Run ``program`` on ``num_ranks`` ranks and wait.

    Args:
        program: a Python file.
        arguments: its command line.
        log: where the output of all ranks goes.
        num_ranks: number of processes.
        timeout: seconds after which everything is ended.
        fork: see :func:`started`.

    Raises:
        AssertionError: a rank failed or the time is over; the message holds the end of the output.
    """
    with started(program, arguments, log=log, num_ranks=num_ranks, fork=fork) as (process, _):
        try:
            outcome = f"ended with {process.wait(timeout)}"
        except subprocess.TimeoutExpired:
            outcome = f"did not end within {timeout} s"
    assert process.returncode == 0, f"{program.name} on {num_ranks} ranks {outcome}:\n{log.read_text()[-6000:]}"


@contextmanager
def started(
    program: Path,
    arguments: Sequence[object],
    *,
    log: Path,
    num_ranks: int = 2,
    variables: Mapping[str, str] | None = None,
    rendezvous: Sequence[str] = ("--standalone",),
    fork: bool = False,
) -> Iterator[tuple[subprocess.Popen, str]]:
    """Run ``program`` meanwhile; yield the launcher and the mark of all its processes, and end what is left.

    Args:
        program: a Python file.
        arguments: its command line.
        log: where the output of all ranks goes.
        num_ranks: number of processes; 0: one without a launcher.
        variables: environment variables besides those of this process.
        rendezvous: how the launcher finds those of other nodes.
        fork: start them with forked_ranks.py, which is quicker, in place of torchrun.
    """
    launcher = ["-m", "torch.distributed.run", *rendezvous, f"--nproc_per_node={num_ranks}"] if num_ranks else []
    if fork:
        launcher = [str(Path(__file__).with_name("forked_ranks.py")), str(num_ranks)]
    command = [sys.executable, *launcher, str(program), *map(str, arguments)]
    mark = uuid.uuid4().hex
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **(variables or {}), MARK: mark}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield process, mark
        finally:
            end(mark)
            process.wait()


def marked(mark: str) -> list[psutil.Process]:
    """Return the processes of one run, found by their environment: torchrun gives each worker a group of its own."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found


def end(mark: str) -> None:
    """End every process of one run."""
    alive = marked(mark)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in alive:
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue
        _, alive = psutil.wait_procs(alive, timeout=GRACE)
