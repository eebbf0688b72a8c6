"""When glibc gives freed memory back to the system; with other C libraries nothing happens here.

Memory that goes back and is asked for again is zeroed by the kernel page by page, in every step.
"""

import ctypes
from contextlib import suppress

# The largest block that moves glibc's thresholds (mallopt(3), M_MMAP_THRESHOLD), but for its header.
_LARGEST = 2**25 - 2**16


def return_freed_memory() -> None:
    """Ask the C library to give what was freed back to the system; glibc may keep hundreds of megabytes otherwise."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory() -> None:
    """Make the C library keep up to 64 MiB of what is freed for what comes next, as it does by itself in the long run.

    Its thresholds grow with the largest block that was freed so far. This frees one, which was never written to.
    """
    with suppress(OSError, AttributeError, TypeError):
        library = ctypes.CDLL(None)
        library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        library.free(library.malloc(ctypes.c_size_t(_LARGEST)))
