"""How long a round of a fleet waits, which replies get a slot, and the log of a round."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from ...participation.quotas import first_to_finish
from ...text import shorten

MAX_STRAYS = 20  # unexpected messages that a round's record names


@dataclass(frozen=True)
class RoundTimeout:
    """How long a round waits, and for how many replies.

    Args:
        timeout: seconds after the round's messages were sent.
        keep: number of reply slots, see `ReplySlots`. The round ends once they are filled. None
            waits for all clients. Later replies are dropped, and their clients are logged.
        poll: seconds between two polls for new replies.
    """

    timeout: float = 600.0
    keep: int | None = None
    poll: float = 1.0

    def __post_init__(self) -> None:
        if not self.timeout > 0 or not self.poll > 0 or (self.keep is not None and self.keep < 1):
            raise InputError(
                f"A round needs timeout > 0, poll > 0 and keep >= 1 or none; got {self}."
            )


@dataclass
class ReplySlots:
    """Slots for the replies that count: the first of each mode, as in a simulation with devices.

    Args:
        mode: mode of each visit, [J].
        slots: number of slots per mode, [K].
        arrived: visits with a valid reply, in order of arrival.
    """

    mode: Tensor
    slots: Tensor
    arrived: list[int] = field(default_factory=list)

    def find_filled(self) -> list[int]:
        """Returns the visits that have a slot if no more replies arrive.

        A slot that its mode cannot fill goes to the next reply of any mode.
        """
        arrival = torch.full((len(self.mode),), torch.inf)
        arrival[self.arrived] = torch.arange(float(len(self.arrived)))
        has_slot = first_to_finish(self.mode, arrival, arrival.isfinite(), self.slots)
        return [int(visit) for visit in has_slot.nonzero()]

    def is_settled(self, waiting: Collection[int]) -> bool:
        """Returns whether none of the visits in `waiting` can still get a slot."""
        has_free_slot = (
            torch.bincount(self.mode[self.arrived], minlength=len(self.slots)) < self.slots
        )
        return len(self.find_filled()) == int(self.slots.sum()) and not bool(
            has_free_slot[self.mode[list(waiting)]].any()
        )


@dataclass
class RoundLog:
    """Events of a round other than training.

    The field names are keys of the table `fleet` in metrics.jsonl: renaming one changes the file
    format. Texts that come from clients are escaped and shortened before they are stored.
    """

    asked: int = 0  # selected visits, without suspended clients and modes with too few clients
    # clients whose reply did not arrive in time, with the reason
    lost: dict[str, str] = field(default_factory=dict)
    # clients whose reply was rejected, with the reason
    refused: dict[str, str] = field(default_factory=dict)
    # clients whose reply was not needed because others were faster
    surplus: list[str] = field(default_factory=list)
    # senders of the first MAX_STRAYS unexpected messages
    stray: list[str] = field(default_factory=list)
    more_strays: int = 0  # number of further unexpected messages
    # clients whose replies to earlier rounds arrived in this round and were dropped
    late: list[str] = field(default_factory=list)
    # clients that had lost their state and started with new state
    forgot: list[str] = field(default_factory=list)
    # clients whose updates were clipped, with the factor
    clipped: dict[str, float] = field(default_factory=dict)
    # clients with most of a mode's weight, with their share
    dominant: dict[str, float] = field(default_factory=dict)
    # planned clients that were not selected because they are suspended
    skipped: list[str] = field(default_factory=list)
    # clients suspended from now on, with the number of visits
    suspended: dict[str, int] = field(default_factory=dict)
    small_cohorts: list[int] = field(default_factory=list)  # modes not updated: too few clients
    unused: list[str] = field(default_factory=list)  # clients whose replies were for such a mode
    broken: list[int] = field(default_factory=list)  # modes restored to their last good state

    def add_lost(self, name: str, reason: str) -> None:
        """Logs a reply that did not arrive."""
        self.lost[name] = shorten(reason)

    def add_rejected(self, name: str, reason: str) -> None:
        """Logs a reply that was rejected."""
        self.refused[name] = shorten(reason)

    def add_stray(self, name: str) -> None:
        """Logs an unexpected message. After the first MAX_STRAYS they are only counted."""
        if len(self.stray) < MAX_STRAYS:
            self.stray.append(shorten(name))
        else:
            self.more_strays += 1

    def to_record(self) -> dict[str, Any]:
        """Returns the record for the run's metrics, without empty entries."""
        return {name: value for name, value in vars(self).items() if value or name == "asked"}

    def format_warnings(self) -> list[str]:
        """Returns lines for the operator."""
        lines = [
            *(
                f"{name} does not count: {reason}"
                for name, reason in [*self.lost.items(), *self.refused.items()]
            ),
            *(
                f"{name}'s update was shortened by {factor:.3g}"
                for name, factor in self.clipped.items()
            ),
            *(
                f"{name} has {share:.0%} of a mode's weight"
                for name, share in self.dominant.items()
            ),
            *(
                f"mode {mode} is not updated: too few clients trained it"
                for mode in self.small_cohorts
            ),
        ]
        return [shorten(line, 400) for line in lines]  # clients' names are untrusted text too
