"""How many cores torch uses, by the user's choice and for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """So many threads inside torch's operations, and as many as before afterwards.

    One for what is small: on a busy machine several wait for each other, in a trial over twenty
    times as long as one works.
    """
    before = torch.get_num_threads()
    if count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


def cores() -> int:
    """Cores that torch may use: the user's choice, by torch.set_num_threads or OMP_NUM_THREADS."""
    return torch.get_num_threads()
