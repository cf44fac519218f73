"""Running out of memory: how to tell, how much there was, and how to say it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from ..errors import InputError
from .hardware import free_memory

OOM_ERRORS = (MemoryError, RuntimeError)  # what may be one; `out_of_memory` tells
SMALLER_VISIT = "lower training.batch_size, or use a smaller model or a larger card or machine"
# by whoever has no type for it
_SAID = ("out of memory", "can't allocate memory", "bad_alloc", "ALLOC_FAILED")
_ASKED = re.compile(r"tried to allocate ([\d.]+) (bytes|[KMGT]iB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there was no memory left, on a GPU or on the host.

    >>> out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory")), out_of_memory(RuntimeError("bad"))
    (True, False)
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _SAID)


def lack(error: BaseException, device: torch.device) -> str:
    """What was asked for and what was free, as far as it is known, in brackets after a space; to be
    asked at once.

    >>> lack(RuntimeError("you tried to allocate 3221225472 bytes."), torch.device("meta"))
    ' (3.0 GiB more were asked for)'
    """
    known = []
    if found := _ASKED.search(str(error)):
        known.append(
            f"{format_gib(float(found[1]) * _UNITS[found[2].lower()])} more were asked for"
        )
    with suppress(Exception):  # after an error, even this may fail
        if device.type in ("cpu", "cuda"):
            known.append(
                f"{format_gib(free_bytes(device if device.type == 'cuda' else None))} were free"
            )
    return f" ({', '.join(known)})" if known else ""


def format_gib(count: float) -> str:
    """Bytes in words.

    >>> format_gib(3 << 30), format_gib(3 << 20)
    ('3.0 GiB', '0.003 GiB')
    """
    size = count / _UNITS["gib"]
    return f"{size:.1f} GiB" if size >= 1 else f"{size:.1g} GiB"


def oom_error(what: str, device: torch.device, lacking: str, advice: str) -> InputError:
    """The error for something that nobody can make smaller but the user."""
    return InputError(f"{what} not fit into the memory of {device}{lacking}: {advice}.")


@contextmanager
def raise_on_oom(what: str, device: torch.device, advice: str) -> Iterator[None]:
    """Within it, running out of memory is an error a user understands.

    Args:
        what: what does not fit then, with its verb: "The data do".
        advice: what to do about it.
    """
    try:
        yield
    except OOM_ERRORS as error:
        if not out_of_memory(error):
            raise
        raise oom_error(what, device, lack(error, device), advice) from None


def free_bytes(device: torch.device | None) -> int:
    """Bytes that are free on a GPU, or on the host."""
    if device is not None:
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    return free_memory()
