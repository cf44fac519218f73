"""Out-of-memory (OOM) errors: how to recognize them, and messages that say what did not fit.

Training recovers from them by using smaller blocks, in `engines/local/oom_retry.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from ..errors import InputError, setting
from .hardware import free_memory

# Types that an out-of-memory error may have. A RuntimeError often is something else, so a handler
# has to check `out_of_memory` as well.
OOM_ERRORS = (MemoryError, RuntimeError)

# Texts of allocators that raise a plain RuntimeError: torch's on the CPU, C++, cuBLAS and cuDNN.
_OOM_TEXTS = ("out of memory", "can't allocate memory", "bad_alloc", "ALLOC_FAILED")
_REQUESTED = re.compile(r"tried to allocate ([\d.]+) (bytes|[KMGT]iB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def advise_smaller_visit() -> str:
    """What to do if one visit does not fit into memory."""
    batch_size = setting("training.batch_size")
    return f"lower {batch_size}, or use a smaller model or a larger GPU or machine"


def out_of_memory(error: BaseException) -> bool:
    """True if an error says that the GPU or the host is out of memory.

    >>> out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    True
    >>> out_of_memory(RuntimeError("bad"))
    False
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OOM_TEXTS)


def memory_report(error: BaseException, device: torch.device) -> str:
    """For messages, e.g. " (3.0 GiB requested, 1.2 GiB free)", or "" if nothing is known.

    Call it right after the failure, before memory is freed.

    >>> memory_report(RuntimeError("you tried to allocate 3221225472 bytes."), torch.device("meta"))
    ' (3.0 GiB requested)'
    """
    facts = []
    if match := _REQUESTED.search(str(error)):
        facts.append(f"{format_gib(float(match[1]) * _UNITS[match[2].lower()])} requested")
    with suppress(Exception):  # after a CUDA error, even this query may fail
        if device.type in ("cpu", "cuda"):
            free = free_bytes(device if device.type == "cuda" else None)
            facts.append(f"{format_gib(free)} free")
    return f" ({', '.join(facts)})" if facts else ""


def format_gib(count: float) -> str:
    """A number of bytes in GiB, as text.

    >>> format_gib(3 << 30), format_gib(3 << 20)
    ('3.0 GiB', '0.003 GiB')
    """
    size = count / _UNITS["gib"]
    return f"{size:.1f} GiB" if size >= 1 else f"{size:.1g} GiB"


def oom_error(what: str, device: torch.device, report: str, advice: str) -> InputError:
    """The error for something that only the user can make smaller.

    Args:
        what: what does not fit, with its verb: "The data do".
        report: of `memory_report`.
        advice: what to do about it.
    """
    return InputError(f"{what} not fit into the memory of {device}{report}: {advice}.")


@contextmanager
def raise_on_oom(what: str, device: torch.device, advice: str) -> Iterator[None]:
    """Turns an out-of-memory error inside it into an InputError; arguments as for `oom_error`."""
    try:
        yield
    except OOM_ERRORS as error:
        if not out_of_memory(error):
            raise
        raise oom_error(what, device, memory_report(error, device), advice) from None


def free_bytes(device: torch.device | None) -> int:
    """Free bytes on a GPU, or on the host if `device` is None."""
    if device is not None:
        # torch's caching allocator reserves more than its tensors occupy; the rest is free for us.
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    return free_memory()
