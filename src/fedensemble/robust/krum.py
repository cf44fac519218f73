"""Krum and Multi-Krum: only clients that lie close to most others count.

Reference: Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine learning with adversaries: Byzantine
tolerant gradient descent", NeurIPS 2017. A client's score is its mean squared distance to its n - f
- 1 nearest neighbours, as in ByzFL (Allouah, Guerraoui, Gupta, Pinot, Rizk, Voitovych 2025), which
  needs n > 2 f; the paper has n - f - 2 and n > 2 f + 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.aggregator import SMALLEST_MAJORITY, Aggregator, aggregators
from ..flat_params import Tree, rows
from .options import check_share, tolerated


@aggregators.register("krum")
@dataclass(frozen=True, kw_only=True)
class Krum(Aggregator):
    """The whole upload of the client that lies closest to most others; all tensors come from that
    client.

    Where a client sends several tensors, or running statistics, its score is the largest of its
    scores on each, in units of the median client's score: neither a large tensor nor large
    statistics hide a small one. Clients count alike, whatever their weight. A mode with one or two
    clients takes their mean.

    Args:
        malicious: share of a mode's clients that may be malicious; f is this share of them, rounded
            up. Take more than the share of all clients: by chance a mode may have more of them in a
            round.
    """

    malicious: float = 0.3

    def __post_init__(self) -> None:
        check_share(self, "malicious")

    def combine(self, changes: Tree, weight: Tensor) -> Tree:
        chosen = self.choose(changes, len(weight))
        return {name: change.mean(0) for name, change in rows(changes, chosen).items()}

    def choose(self, changes: Tree, clients: int) -> Tensor:
        """Which of a mode's n clients count, by their places."""
        best = self.best(changes, clients, 1)
        return best if clients >= SMALLEST_MAJORITY else torch.arange(clients, device=best.device)

    def best(self, changes: Tree, clients: int, count: int) -> Tensor:
        """The `count` clients with the lowest scores; of equal ones, those with the lower
        numbers.
        """
        return torch.argsort(krum_scores(changes, tolerated(self.malicious, clients)), stable=True)[
            :count
        ]


@aggregators.register("multi-krum")
@dataclass(frozen=True, kw_only=True)
class MultiKrum(Krum):
    """The mean of the n - f clients with the lowest Krum scores.

    Args:
        weighted: whether the chosen clients count by their weight; it is what they claim to have.
    """

    weighted: bool = False

    def combine(self, changes: Tree, weight: Tensor) -> Tree:
        chosen = self.choose(changes, len(weight))
        share = weight[chosen] if self.weighted else torch.ones_like(weight[chosen])
        share = share / share.sum()
        return {
            name: share.to(change.dtype) @ change for name, change in rows(changes, chosen).items()
        }

    def choose(self, changes: Tree, clients: int) -> Tensor:
        return (
            self.best(changes, clients, clients - tolerated(self.malicious, clients)).sort().values
        )


def krum_scores(changes: Tree, f: int) -> Tensor:
    """The score of each of n clients whose changes are [n, P] for each tensor, [n]."""
    scores = []
    for change in changes.values():
        near = torch.sort(
            torch.cdist(change, change, compute_mode="donot_use_mm_for_euclid_dist") ** 2, dim=1
        ).values
        score = near[:, 1 : max(len(change) - f, 2)].sum(1).double()
        middle = score.median()
        scores.append(score / torch.where(middle > 0, middle, torch.ones_like(middle)))
    return torch.stack(scores).amax(0)
