"""How long a round of a fleet waits, and what is written down of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...errors import InputError


@dataclass(frozen=True)
class Patience:
    """How long a round waits, and for whom.

    Args:
        timeout: seconds from the sending of a round's messages.
        keep: answers after which the round ends at once; None waits for all. Later ones are dropped and counted.
        poll: seconds between two looks at what came in.
    """

    timeout: float = 600.0
    keep: int | None = None
    poll: float = 1.0

    def __post_init__(self) -> None:
        if not self.timeout > 0 or not self.poll > 0 or (self.keep is not None and self.keep < 1):
            raise InputError(f"A round needs timeout > 0, poll > 0 and keep >= 1 or none; got {self}.")


@dataclass
class RoundLog:
    """What happened beside the training."""

    asked: int = 0
    lost: dict[str, str] = field(default_factory=dict)  # clients whose answer did not come in time, and why
    refused: dict[str, str] = field(default_factory=dict)  # clients whose answer does not count, and why
    surplus: list[str] = field(default_factory=list)  # clients that were asked, but others were quicker
    stray: list[str] = field(default_factory=list)  # messages that nobody waited for
    late: int = 0  # answers to earlier rounds that came in since; dropped
    forgot: list[str] = field(default_factory=list)  # clients that had lost their memory and began afresh

    def record(self) -> dict[str, Any]:
        """For the run's metrics; what did not happen is left out."""
        return {name: value for name, value in vars(self).items() if value or name == "asked"}
