"""The main function of a teacher process: load, say what the teacher gives, and serve until the student is gone."""

import json
import os
import signal
import sys
import threading
from datetime import timedelta
from typing import Any, BinaryIO


def main() -> None:
    """Run a teacher process; everything it needs comes through standard input, whose end is its end."""
    pipe = sys.stdin.buffer
    start = json.loads(pipe.readline())
    payload = pipe.read(start["payload"])
    threading.Thread(target=_leave_with_parent, args=(pipe,), daemon=True).start()
    # Ctrl-C reaches the whole terminal; the student decides, and its end closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path[:] = start["search_path"]
    if start["cores"]:
        os.sched_setaffinity(0, start["cores"])
        os.environ["OMP_NUM_THREADS"] = str(len(start["cores"]))
    _run(start, payload)


def _leave_with_parent(pipe: BinaryIO) -> None:
    pipe.read()
    os._exit(0)


def _run(start: dict[str, Any], payload: bytes) -> None:
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    rank = start["rank"]
    if start["cores"]:
        torch.set_num_threads(len(start["cores"]))
    store = TCPStore("127.0.0.1", start["port"], timeout=timedelta(seconds=start["timeout"]))
    try:
        from silverspoon_kd.teacher.world.server import Server
        from silverspoon_kd.teacher.world.weights import load

        spec = load(payload, start["file"], start["nbytes"])
        Server(spec, rank, store).run()
    except BaseException as error:
        from silverspoon_kd.teacher.world.reports import ReportedError, report_of
        from silverspoon_kd.teacher.world.watch import Board

        known = isinstance(error, ReportedError)
        report = error.report if known else report_of(error, "", alone=start["alone"])  # type: ignore[attr-defined]
        Board(store, 1, 1).post(f"failed/{rank}", report)
        # Other threads may be inside a collective that never ends.
        os._exit(1)


if __name__ == "__main__":
    main()
