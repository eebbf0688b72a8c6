"""Start ranks from one process that has imported everything: ``forked_ranks.py NUM_RANKS PROGRAM [ARGUMENT ...]``.

Each rank is a process with the variables that torchrun sets, and the first that fails ends all. But imports, which take
longer than most runs, are made once. For programs whose start is not what is tested.
"""

import os
import runpy
import signal
import socket
import sys


def main(num_ranks: int, command: list[str]) -> int:
    """Run the program on all ranks; return 0 if none failed.

    Args:
        num_ranks: number of processes.
        command: the program and its arguments.
    """
    # Nothing here starts a thread or uses a device, which a fork would break.
    import silverspoon_kd.training.distillers  # noqa: F401

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    running = set()
    for rank in range(num_ranks):
        child = os.fork()
        if child == 0:
            variables = {**world, "RANK": rank, "LOCAL_RANK": rank}
            os.environ.update({name: str(value) for name, value in variables.items()})
            sys.argv = command
            runpy.run_path(command[0], run_name="__main__")
            return 0
        running.add(child)
    failed = 0
    while running:
        child, status = os.wait()
        running.remove(child)
        if status and not failed:
            failed = 1
            for other in running:
                os.kill(other, signal.SIGTERM)
    return failed


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
