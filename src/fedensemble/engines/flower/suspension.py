"""Clients whose answers fail again and again are left out for a while."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from ...flat_params import Tree

LONGEST = 64  # visits that a client is left out for at most: it may have been repaired


class Conduct:
    """Who failed how often in a row, and for how many visits a client is suspended.

    A failure is an answer that was refused, or none at all from a client that was asked. After
    `after` failures in a row a client misses its next two visits; if it fails again, four, then
    eight, up to 64. Visits are counted, not
    rounds: where few of many clients are asked in a round, a few rounds would be no suspension. An
    answer that passes the checks ends it.

    Args:
        clients: their number, N.
        after: failures in a row; None suspends nobody.
    """

    def __init__(self, clients: int, after: int | None = None) -> None:
        self.after = after
        self.failures = torch.zeros(clients, dtype=torch.int64)  # in a row, [N]
        # visits each client still misses, [N]
        self.suspended = torch.zeros(clients, dtype=torch.int64)

    def absent(self, client: Tensor) -> Tensor:
        """Which of the planned clients, [J], are suspended."""
        return self.suspended[client] > 0

    def record(
        self, skipped: Collection[int], failed: Collection[int], passed: Collection[int]
    ) -> dict[int, int]:
        """Enters what happened in a round; gives the clients that are suspended from now on, and
        for how many visits.

        A round in which nobody's answer passed tells nothing of single clients: the server's
        network, or the model itself, may be at fault. If it counted, one outage could suspend the
        whole fleet.
        """
        self.suspended[list(skipped)] -= 1
        if self.after is None or not passed:
            return {}
        self.failures[[client for client in passed if client not in failed]] = 0
        fresh = {}
        for client in sorted(failed):
            self.failures[client] += 1
            beyond = int(self.failures[client]) - self.after
            if beyond >= 0:
                fresh[client] = min(2 ** min(beyond + 1, 30), LONGEST)
                self.suspended[client] = fresh[client]
        return fresh

    def tensors(self) -> Tree:
        """For a checkpoint."""
        return {"failures": self.failures, "suspended": self.suspended}

    def load(self, tensors: Tree) -> None:
        """Puts back what `tensors` gave; a checkpoint of an earlier version has neither."""
        self.failures = tensors.get("failures", self.failures).clone()
        self.suspended = tensors.get("suspended", self.suspended).clone()


def too_small(modes: Collection[int], least: int) -> set[int]:
    """Modes with at least one visit and fewer than `least`.

    >>> too_small([0, 0, 1], 2)
    {1}
    """
    counts = torch.bincount(torch.tensor(list(modes), dtype=torch.int64))
    return {mode for mode, count in enumerate(counts.tolist()) if 0 < count < least}
