"""Every student rank learns of the teacher's failure, also one that is waiting for the other students just then."""

import json
import logging
import threading
import time

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from silverspoon_kd.teacher.world.reports import Report, error_of

logger = logging.getLogger(__name__)

_PAUSE = 0.1  # seconds between two looks
# Seconds in which the main thread may raise an error that was found, before it is logged.
_RAISING = 1.0


class Board:
    """The reports of a node's world, in its store.

    Args:
        store: a client of the node's store.
        num_processes: of the world.
        num_students: on the node.
    """

    def __init__(self, store: TCPStore, num_processes: int, num_students: int) -> None:
        self._store, self._num_students = store, num_students
        ranks = range(num_processes)
        # What a process said before it ended is worth more than how it ended.
        self._keys = [[f"failed/{rank}", f"ended/{rank}"] for rank in ranks] + [["failed/student"]]

    def post(self, key: str, report: Report) -> None:
        """Let all students know; ``key`` is "failed/" or "ended/" with the rank of a process, or "failed/student"."""
        self._store.set(key, json.dumps(report))
        self._store.add("reports", 1)

    def read(self) -> list[Report]:
        """Return a report of each process that failed."""
        if self._store.add("reports", 0) == 0:
            return []
        found = [next((key for key in keys if self._store.check([key])), None) for keys in self._keys]
        return [json.loads(self._store.get(key)) for key in found if key is not None]

    def acknowledge(self) -> None:
        """Say that this student knows."""
        self._store.add("informed", 1)

    def wait_until_all_know(self, seconds: float) -> None:
        """Wait until every student has acknowledged, or the time is over."""
        deadline = time.monotonic() + seconds
        while self._store.add("informed", 0) < self._num_students and time.monotonic() < deadline:
            time.sleep(0.02)


class FailureWatch:
    """A thread that looks at the board.

    A rank that waits for the teacher raises what it finds there. One that waits in a collective of the students cannot:
    it logs the reason, and its main thread raises it as soon as the collective breaks.

    Args:
        board: of the node, through a client of its own.
        local_rank: of this student.
        grace: seconds until a clear reason must have followed a doubtful one.
    """

    def __init__(self, board: Board, local_rank: int, grace: float) -> None:
        self._board, self._local_rank, self._grace = board, local_rank, grace
        self._report: Report | None = None
        self._found, self._raised, self._stop = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def reason(self, seconds: float) -> Report | None:
        """Return what the caller will raise, which may still be on its way for some seconds."""
        if not self._found.wait(seconds):
            return None
        self._raised.set()
        return self._report

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        try:
            self._report = self._clearest()
            if self._report is None:
                return
            self._found.set()
            if not self._raised.wait(_RAISING):
                reason = error_of(self._report)
                logger.error("The teacher has failed and rank %d of its students stops. %s", self._local_rank, reason)
            self._board.acknowledge()
        except RuntimeError:
            logger.debug("The store of the teacher world is gone: the node's first student rank has ended.")

    def _clearest(self) -> Report | None:
        deadline = None
        while not self._stop.wait(_PAUSE):
            found = self._board.read()
            deadline = deadline or (time.monotonic() + self._grace if found else None)
            clear = [report for report in found if not report["doubtful"]]
            if clear or (deadline and time.monotonic() > deadline):
                return (clear or found)[0]
        return None
