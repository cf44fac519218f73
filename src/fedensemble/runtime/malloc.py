"""Memory that a CPU's work gives back and takes again many times a second."""

from __future__ import annotations

import ctypes
import os
from functools import cache

_TRIM, _MMAP = -1, -3  # numbers of glibc's parameters
_KEPT = 1 << 30
_LARGEST = 32 << 20  # the most that glibc takes


@cache
def keep_freed_memory() -> bool:
    """Lets the process keep up to 1 GiB of what it freed, and says whether that could be asked for.

    glibc returns every larger piece to the system, which then clears it page by page for the next
    step: a quarter of a CNN's time. Other C libraries are left alone, and so are users who set its
    variables.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return all(mallopt(*setting) == 1 for setting in ((_MMAP, _LARGEST), (_TRIM, _KEPT)))
