"""A quiet end of processes that used gloo."""

import time


def let_threads_finish() -> None:
    """Give gloo's threads time to let go of their tensors, where the process may be about to end.

    One that does so while the interpreter ends aborts the process, after all its work is done (torch 2.13: the last
    holder of a tensor takes Python's lock, and Python ends threads that ask for it then).
    """
    time.sleep(0.1)
