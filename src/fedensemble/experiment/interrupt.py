"""Ctrl-C between rounds: the first one waits for the round to end, so that its work is on disk; the
second does not.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Interruption:
    """Whether the user has asked to stop."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.asked, self._say = False, say

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The signal's handler."""
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._say("Stopping after this round; press Ctrl-C again to stop at once.")


@contextmanager
def interruptible(say: Callable[[str], None]) -> Iterator[Interruption]:
    """Within it, Ctrl-C only sets `asked`; elsewhere than in the main thread Python knows no
    signals.
    """
    interruption = Interruption(say)
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    before = signal.signal(signal.SIGINT, interruption)
    try:
        yield interruption
    finally:
        signal.signal(signal.SIGINT, before)
