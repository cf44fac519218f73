"""The number of threads that torch's operators use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Sets the number of threads inside torch's operators, and restores it on exit.

    One thread is best for small operators: on a busy machine, several threads wait for each other
    at the end of every operator, which was measured to take more than 20 times as long.
    """
    before = torch.get_num_threads()
    if count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


def available_threads() -> int:
    """Threads that torch may use, as set by torch.set_num_threads or OMP_NUM_THREADS."""
    return torch.get_num_threads()
