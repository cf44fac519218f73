"""Ctrl-C during training: the first one stops after the current round, the second one at once.

Stopping after a round loses no work: the round is in the checkpoint.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Interruption:
    """Signal handler that records whether the user has pressed Ctrl-C.

    Args:
        say: prints a message to the user.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.requested, self._say = False, say

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Sets `requested`, or raises KeyboardInterrupt if it is set already."""
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._say("Stopping after this round; press Ctrl-C again to stop at once.")


@contextmanager
def interruptible(say: Callable[[str], None]) -> Iterator[Interruption]:
    """Context in which the first Ctrl-C sets `requested` instead of raising KeyboardInterrupt."""
    interruption = Interruption(say)
    # Python allows signal handlers in the main thread only; other threads never get the signal.
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    previous_handler = signal.signal(signal.SIGINT, interruption)
    try:
        yield interruption
    finally:
        signal.signal(signal.SIGINT, previous_handler)
