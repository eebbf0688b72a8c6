"""Starting, joining and ending the teacher world of a node."""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from silverspoon_kd.errors import TeacherError
from silverspoon_kd.teacher.world.link import Link, interruptible
from silverspoon_kd.teacher.world.reports import Report, ended_report, error_of
from silverspoon_kd.teacher.world.spec import WorldSpec
from silverspoon_kd.teacher.world.watch import Board, FailureWatch
from silverspoon_kd.teacher.world.weights import SharedWeights, dump

logger = logging.getLogger(__name__)

# Seconds until a process that should end is made to, and until the reason of a failure must be known.
_GRACE = 3.0

# A process that was launched by torchrun or accelerate must not look to its child like one of its own ranks.
_LAUNCHER_VARIABLES = (
    "TORCHELASTIC_",
    "GROUP_",
    "ROLE_",
    "ACCELERATE_",
    "FSDP_",
    "RANK",
    "LOCAL_",
    "WORLD_SIZE",
    "MASTER_",
)


class World:
    """The teacher world of this node, seen from one student rank.

    Args:
        spec: of the world.
        local_rank: of this student among those of the node; 0 starts the processes.
        port: of the store, for ranks other than 0.
        shared: the weights of a teacher that was given as a module.
    """

    def __init__(self, spec: WorldSpec, local_rank: int, port: int | None, shared: SharedWeights | None) -> None:
        self._spec, self._local_rank = spec, local_rank
        self._processes: list[subprocess.Popen] = []
        self._closed = self._ending = False
        self._raised: tuple[Exception | None, Report | None] = None, None
        self.lead = spec.num_students
        self.store = self._client(port or 0, is_master=local_rank == 0)
        self._board = Board(self.store, spec.num_processes, spec.num_students)
        # A client serves one thread at a time.
        own = Board(self._client(self.port), spec.num_processes, spec.num_students)
        self._failure = FailureWatch(own, local_rank, _GRACE)
        if local_rank == 0:
            self._start(shared)

    @property
    def port(self) -> int:
        """The store's port, for the other students of the node."""
        return self.store.port

    def facts(self) -> dict[str, Any]:
        """Wait until the teacher is loaded and return what it says of itself.

        Raises:
            TeacherError: a teacher process ended or did not answer in time; or its own exception.
        """
        limit = self._spec.load_timeout
        deadline = time.monotonic() + limit
        while not self.store.check(["hello"]):
            if self._board.read():
                self.fail()
            if time.monotonic() > deadline:
                raise TeacherError(f"The teacher was not loaded within {limit:.0f} s. Raise teacher_load_timeout.")
            time.sleep(0.05)
        return json.loads(self.store.get("hello"))

    def connect(self, *, pinned: bool) -> Link:
        """Join the wire; all students and teacher processes of the node do so at once.

        Args:
            pinned: see :class:`Link`.
        """
        size, limits = self._spec.num_students + self._spec.num_processes, (self._spec.load_timeout, self._spec.timeout)
        with self.watching():
            return interruptible(lambda: Link(self.store, self._local_rank, size, *limits, pinned=pinned))

    @property
    def num_answering(self) -> int:
        """Among how many processes the rows of a request are divided, each of which sends its activations."""
        return self._spec.num_processes if self._spec.strategy == "sharded" else 1

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Turn a broken or silent wire into the teacher's own error.

        Raises:
            TeacherError: a teacher process ended or did not answer.
        """
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, TeacherError):
                raise
            self.fail(cause=error)

    def fail(self, told: Report | None = None, cause: Exception | None = None) -> NoReturn:
        """Raise what is known of a failure.

        Args:
            told: what a teacher process sent.
            cause: what the wire said.

        Raises:
            TeacherError: a process of the world ended or did not answer.
            Exception: the teacher's own.
        """
        # The reason may be on its way: others learn of the end of a process before it is reported.
        report = told if told and not told["doubtful"] else self._failure.reason(2 * _GRACE) or told
        if report is None:
            raise TeacherError(
                f"The teacher did not answer within {self._spec.timeout:.0f} s, or its wire broke ({cause}). Raise "
                "teacher_timeout if a forward takes longer."
            ) from cause
        self._raised = error_of(report), report
        raise self._raised[0]

    def leave(self, error: Exception) -> NoReturn:
        """End this student's part with the teacher's error if that is behind its own, when all students know of it.

        A rank that leaves breaks the collectives in which others wait for it, and a launcher stops them at once.

        Args:
            error: that ended the training here.

        Raises:
            Exception: the teacher's own, or ``error``.
        """
        teachers, report = self._raised
        try:
            if error is not teachers:
                report = self._failure.reason(1.0) if isinstance(error, RuntimeError) else None
            elif report is not None and self._spec.num_students > 1 and not self._board.read():
                self._board.post("failed/student", report)
            if report is not None and self._spec.num_students > 1:
                self._failure.reason(_GRACE)
                self._board.wait_until_all_know(_GRACE)
        except RuntimeError:
            logger.debug("The store of the teacher world is gone: the node's first student rank has ended.")
        raise error if report is None or error is teachers else error_of(report)

    def close(self) -> None:
        """End the world: the processes leave when their pipe is closed. Called again it does nothing."""
        if self._closed:
            return
        self._closed = self._ending = True
        self._failure.stop()
        try:
            done = self.store.add("students_done", 1)
            # After Ctrl-C the others may be in a collective, deaf to it until this process has ended.
            interrupted = getattr(sys, "last_type", None) is KeyboardInterrupt
            deadline = time.monotonic() + (0.5 if interrupted else 5)
            while self._processes and done < self._spec.num_students and time.monotonic() < deadline:
                time.sleep(0.02)
                done = self.store.add("students_done", 0)
        except RuntimeError:
            logger.debug("The store of the teacher world is gone already.")
        for process in self._processes:
            if process.stdin:
                process.stdin.close()
        deadline = time.monotonic() + _GRACE
        for process in self._processes:
            try:
                process.wait(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _client(self, port: int, *, is_master: bool = False) -> TCPStore:
        timeout = timedelta(seconds=self._spec.load_timeout)
        return TCPStore("127.0.0.1", port, is_master=is_master, wait_for_workers=False, timeout=timeout)

    def _start(self, shared: SharedWeights | None) -> None:
        payload = dump(self._spec, shared)
        environment = {key: value for key, value in os.environ.items() if not key.startswith(_LAUNCHER_VARIABLES)}
        for rank in range(self._spec.num_processes):
            start = {
                "rank": rank,
                "alone": self._spec.num_processes == 1,
                "port": self.port,
                "timeout": self._spec.load_timeout,
                "cores": self._cores_of(rank),
                "search_path": self._spec.search_path,
                "file": shared.path if shared else None,
                "nbytes": shared.nbytes if shared else 0,
                "payload": len(payload),
            }
            command = [sys.executable, "-m", "silverspoon_kd.teacher.world.process"]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
            self._processes.append(process)
            threading.Thread(target=self._feed, args=(process, start, payload), daemon=True).start()
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()

    def _cores_of(self, rank: int) -> list[int]:
        cores = self._spec.cores
        own = cores if self._spec.strategy == "pp" else cores[rank : rank + 1]
        return sorted({core for device in own for core in device})

    def _feed(self, process: subprocess.Popen, start: dict[str, Any], payload: bytes) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(start).encode() + b"\n" + payload)
            process.stdin.flush()
        except OSError:
            logger.debug("The teacher process %d ended before it was told what to do.", process.pid)

    def _watch(self, rank: int, process: subprocess.Popen) -> None:
        code = process.wait()
        if self._ending:
            return
        self._ending = True
        self._board.post(f"ended/{rank}", ended_report(rank, process.pid, code))
        # The others may be in a collective that never ends, and the students wait for them.
        for other in self._processes:
            other.kill()
