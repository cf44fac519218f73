"""glibc's allocator: keep freed memory for the next training step."""

from __future__ import annotations

import ctypes
import os
from functools import cache

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt
_KEPT_BYTES = 1 << 30
_MAX_MMAP_THRESHOLD = 32 << 20  # the largest value that glibc accepts


@cache
def keep_freed_memory() -> bool:
    """Lets the process keep up to 1 GiB of freed memory; returns whether the setting was accepted.

    By default glibc returns large freed blocks to the operating system, and the next training step
    page-faults them back in: a quarter of the time of a small CNN on a CPU. The setting holds for
    the whole process, so the library never makes it: the command line does, and a program may.
    Other C libraries, and users who set `MALLOC_*` or `GLIBC_TUNABLES`, are left alone.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    settings = ((_M_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD), (_M_TRIM_THRESHOLD, _KEPT_BYTES))
    return all(mallopt(*setting) == 1 for setting in settings)
