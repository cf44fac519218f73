"""Krum and Multi-Krum: only clients whose changes are close to most others count.

Reference: Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine learning with adversaries: Byzantine
tolerant gradient descent", NeurIPS 2017. A client's score is its mean squared distance to its
(n - f - 1) nearest neighbors, as in ByzFL (Allouah, Guerraoui, Gupta, Pinot, Rizk, Voitovych 2025),
which needs n > 2 f. The paper uses n - f - 2 neighbors and needs n > 2 f + 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.aggregator import SMALLEST_MAJORITY, Aggregator, aggregators
from ..flat_params import Tree, select_rows
from .options import check_share, tolerated


@aggregators.register("krum")
@dataclass(frozen=True, kw_only=True)
class Krum(Aggregator):
    """The upload of the client that is closest to most others; all tensors are of that client.

    If clients upload several tensors, or running statistics, a client's score is the largest of its
    scores per tensor, in units of the median score, so that a large tensor cannot hide a small one.
    All clients count equally, independent of their weight. A mode with one or two clients takes
    their mean.

    Args:
        malicious: share of a mode's clients that may be malicious; f is the corresponding number of
            clients, rounded up. Use more than the share of malicious clients in the population: by
            chance, a mode may have more of them in a round.
    """

    malicious: float = 0.3

    def __post_init__(self) -> None:
        check_share(self, "malicious")

    def combine(self, changes: Tree, weight: Tensor) -> Tree:
        chosen = self.choose(changes, len(weight))
        return {name: change.mean(0) for name, change in select_rows(changes, chosen).items()}

    def choose(self, changes: Tree, clients: int) -> Tensor:
        """Indices of the clients that count, of a mode's n clients."""
        best = self.best(changes, clients, 1)
        return best if clients >= SMALLEST_MAJORITY else torch.arange(clients, device=best.device)

    def best(self, changes: Tree, clients: int, count: int) -> Tensor:
        """Indices of the `count` clients with the lowest scores; ties prefer lower indices."""
        scores = krum_scores(changes, tolerated(self.malicious, clients))
        return torch.argsort(scores, stable=True)[:count]


@aggregators.register("multi-krum")
@dataclass(frozen=True, kw_only=True)
class MultiKrum(Krum):
    """The mean of the n - f clients with the lowest Krum scores.

    Args:
        weighted: whether the chosen clients count by their weight, which is what they claim to
            have.
    """

    weighted: bool = False

    def combine(self, changes: Tree, weight: Tensor) -> Tree:
        chosen = self.choose(changes, len(weight))
        share = weight[chosen] if self.weighted else torch.ones_like(weight[chosen])
        share = share / share.sum()
        return {
            name: share.to(change.dtype) @ change
            for name, change in select_rows(changes, chosen).items()
        }

    def choose(self, changes: Tree, clients: int) -> Tensor:
        count = clients - tolerated(self.malicious, clients)
        return self.best(changes, clients, count).sort().values


def krum_scores(changes: Tree, f: int) -> Tensor:
    """The score of each of n clients, [n]; changes are [n, P] per tensor."""
    scores = []
    for change in changes.values():
        # Not by a matmul, which loses the small distances between similar clients to rounding.
        distances = torch.cdist(change, change, compute_mode="donot_use_mm_for_euclid_dist") ** 2
        nearest = torch.sort(distances, dim=1).values  # column 0 is the client itself
        score = nearest[:, 1 : max(len(change) - f, 2)].sum(1).double()
        median = score.median()
        scores.append(score / torch.where(median > 0, median, torch.ones_like(median)))
    return torch.stack(scores).amax(0)
