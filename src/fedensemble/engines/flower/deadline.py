"""How long a round of a fleet waits, for whom, and what is written down of it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from ...participation.quotas import first_to_finish
from ...text import shorten

STRAYS = 20  # that a round's record names


@dataclass(frozen=True)
class RoundTimeout:
    """How long a round waits, and for whom.

    Args:
        timeout: seconds from the sending of a round's messages.
        keep: places of the round, see `ReplySlots`; once they are taken it ends. None waits for
            all. Later answers are dropped and named.
        poll: seconds between two looks at what came in.
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
    """Which answers count: so many of each mode, the first to come, as in a simulation with
    devices.

    Args:
        mode: of each visit, [J].
        each: places of each mode, [K].
        came: visits that were answered, in the order of the answers.
    """

    mode: Tensor
    each: Tensor
    came: list[int] = field(default_factory=list)

    def taken(self) -> list[int]:
        """Visits that have a place if nobody else answers; one that a mode cannot fill goes to the
        next of any.
        """
        when = torch.full((len(self.mode),), torch.inf)
        when[self.came] = torch.arange(float(len(self.came)))
        return [
            int(visit)
            for visit in first_to_finish(self.mode, when, when.isfinite(), self.each).nonzero()
        ]

    def settled(self, waiting: Collection[int]) -> bool:
        """Whether none of the visits that are still waited for could get a place."""
        short = torch.bincount(self.mode[self.came], minlength=len(self.each)) < self.each
        return len(self.taken()) == int(self.each.sum()) and not bool(
            short[self.mode[list(waiting)]].any()
        )


@dataclass
class RoundLog:
    """What happened beside the training; all texts that come from clients are made printable and
    cut.
    """

    asked: int = 0
    # clients whose answer did not come in time, and why
    lost: dict[str, str] = field(default_factory=dict)
    # clients whose answer does not count, and why
    refused: dict[str, str] = field(default_factory=dict)
    # clients that were asked, but others were quicker
    surplus: list[str] = field(default_factory=list)
    # messages that nobody waited for; the first few of them
    stray: list[str] = field(default_factory=list)
    more_strays: int = 0  # how many more there were
    # clients whose answers to earlier rounds came in now; dropped
    late: list[str] = field(default_factory=list)
    # clients that had lost their memory and began afresh
    forgot: list[str] = field(default_factory=list)
    # clients whose updates were shortened, by what factor
    clipped: dict[str, float] = field(default_factory=dict)
    # clients with most of a mode's weight, and their share
    dominant: dict[str, float] = field(default_factory=dict)
    # clients that were not asked because they are suspended
    skipped: list[str] = field(default_factory=list)
    # clients suspended from now on, for how many visits
    suspended: dict[str, int] = field(default_factory=dict)
    small_cohorts: list[int] = field(default_factory=list)  # modes not updated: too few clients
    unused: list[str] = field(default_factory=list)  # clients whose answers went to such a mode
    broken: list[int] = field(default_factory=list)  # modes put back to their last good state

    def lose(self, name: str, reason: str) -> None:
        """Notes an answer that did not come."""
        self.lost[name] = shorten(reason)

    def refuse(self, name: str, reason: str) -> None:
        """Notes an answer that must not count."""
        self.refused[name] = shorten(reason)

    def add_stray(self, name: str) -> None:
        """Notes a message that nobody waited for; a flood of them is only counted."""
        if len(self.stray) < STRAYS:
            self.stray.append(shorten(name))
        else:
            self.more_strays += 1

    def record(self) -> dict[str, Any]:
        """For the run's metrics; what did not happen is left out."""
        return {name: value for name, value in vars(self).items() if value or name == "asked"}

    def warnings(self) -> list[str]:
        """Lines for the operator."""
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
        return [shorten(line, 400) for line in lines]  # names too are somebody else's words
