"""Suspension of clients that fail several times in a row, and detection of small cohorts."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from ...flat_params import Tree

MAX_SUSPENSION = 64  # visits; bounded because a client may have been repaired


class SuspensionTracker:
    """Counts each client's failures in a row and the visits for which it is suspended.

    A client fails if its reply is rejected, or if it was selected and did not reply. After `after`
    failures in a row it is suspended for its next two visits. If it fails again, it is for four,
    then eight, up to 64. Visits are counted instead of rounds: where only few clients are selected
    per round, a client would hardly notice a suspension of some rounds. A valid reply resets the
    count.

    Args:
        clients: number of clients, N.
        after: failures in a row that lead to a suspension; None never suspends.
    """

    def __init__(self, clients: int, after: int | None = None) -> None:
        self.after = after
        self.failures = torch.zeros(clients, dtype=torch.int64)  # in a row, [N]
        # number of visits that each client still misses, [N]
        self.suspended = torch.zeros(clients, dtype=torch.int64)

    def is_suspended(self, client: Tensor) -> Tensor:
        """Returns a mask of the planned clients, [J], that are suspended."""
        return self.suspended[client] > 0

    def record(
        self, skipped: Collection[int], failed: Collection[int], passed: Collection[int]
    ) -> dict[int, int]:
        """Records a round; returns newly suspended clients with the number of visits they miss.

        A round in which no reply was valid says nothing about single clients: the cause may be the
        server's network or the model itself. Without this exception one outage could suspend the
        whole fleet.
        """
        self.suspended[list(skipped)] -= 1
        if self.after is None or not passed:
            return {}
        self.failures[[client for client in passed if client not in failed]] = 0
        newly_suspended = {}
        for client in sorted(failed):
            self.failures[client] += 1
            excess = int(self.failures[client]) - self.after
            if excess >= 0:
                # The exponent is bounded so that 2 ** exponent stays a small integer.
                newly_suspended[client] = min(2 ** min(excess + 1, 30), MAX_SUSPENSION)
                self.suspended[client] = newly_suspended[client]
        return newly_suspended

    def to_tensors(self) -> Tree:
        """Returns the tensors to save in a checkpoint."""
        return {"failures": self.failures, "suspended": self.suspended}

    def load_tensors(self, tensors: Tree) -> None:
        """Restores `to_tensors`. Checkpoints of earlier versions have neither tensor."""
        self.failures = tensors.get("failures", self.failures).clone()
        self.suspended = tensors.get("suspended", self.suspended).clone()


def find_small_cohorts(modes: Collection[int], min_cohort: int) -> set[int]:
    """Returns the modes with at least one visit but fewer than `min_cohort`.

    >>> find_small_cohorts([0, 0, 1], 2)
    {1}
    """
    counts = torch.bincount(torch.tensor(list(modes), dtype=torch.int64))
    return {mode for mode, count in enumerate(counts.tolist()) if 0 < count < min_cohort}
