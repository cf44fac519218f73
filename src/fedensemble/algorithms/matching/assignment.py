"""Hidden units of several networks matched to each other: the maximum a posteriori of the
Beta-Bernoulli process.

Clients' units v_jl are noisy copies, N(u_i, sigma_j^2), of global units u_i ~ N(0, sigma0^2); which
client has which of them is drawn from a Beta-Bernoulli process of mass gamma. Given all others,
unit l of client j gains, by being unit i,

||v_jl/s_j + S_i||^2 / (1/s0 + 1/s_j + P_i) - ||S_i||^2 / (1/s0 + P_i) + 2 log(n_i / (J - n_i))   if n_i others have it,
||v_jl/s_j||^2 / (1/s0 + 1/s_j) - 2 log r + 2 log(gamma / J)                                      as the r-th new unit,

with s = sigma^2, S_i the sum of v/s and P_i of 1/s over the others matched to i. The best
assignment of a client is found by the Hungarian algorithm; clients take turns.

Reference: Yurochkin, Agarwal, Ghosh, Greenewald, Hoang, Khazaeni, "Bayesian nonparametric federated
learning of neural networks", ICML 2019, equations 8 and 9, with prior mean 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Prior:
    """What is believed of units before they are seen.

    Args:
        sigma: how far a client's unit is from the global one; a client of mean weight has it,
            others sigma / sqrt(w).
        sigma0: how far global units are from 0.
        gamma: how readily clients have units of their own.
    """

    sigma: float
    sigma0: float
    gamma: float


def match_units(vectors: Tensor, used: Tensor, weight: Tensor, prior: Prior, sweeps: int) -> Tensor:
    """The global unit of each client's unit, [J, W]; every row is a permutation, and unused units
    get what is left.

    Clients are matched one after another, the first keeping its order; then each is matched anew to
    all others, `sweeps` times or until nothing changes.

    Args:
        vectors: what units are told apart by, [J, W, D].
        used: which units a client has, [J, W]; W is also the most that there can be.
        weight: of clients, [J].
    """
    state = _Matching(vectors.double(), used, weight.double() / weight.double().mean(), prior)
    for client in range(len(vectors)):
        state.place(client)
    for _ in range(sweeps if len(vectors) > 1 else 0):
        before = state.slot.clone()
        for client in range(len(vectors)):
            state.take_out(client)
            state.place(client)
        if torch.equal(state.slot, before):
            break
    return state.slot


def nearest_units(own: Tensor, theirs: Tensor, own_used: Tensor, used: Tensor) -> Tensor:
    """The place of each of a network's units among those of another, [J, W]; every row is a
    permutation.

    The closest pair of units comes first, then the closest of those that are left, and so on; units
    that are not in use on one side come last. Unlike the Hungarian algorithm this is arithmetic on
    tensors, which clients can do in a batch and on any device; where units of one network have been
    matched to the other before, both agree.

    Args:
        own, theirs: what units are told apart by, [J, W, D].
        own_used, used: which units either network has, [J, W].

    >>> theirs = torch.tensor([[[0.0], [5.0], [9.0]]])
    >>> nearest_units(theirs.flip(1) + 0.1, theirs, *(2 * [torch.ones(1, 3, dtype=torch.bool)])).tolist()
    [[2, 1, 0]]
    """
    networks, width, _ = own.shape
    score = -torch.cdist(own, theirs)
    both = own_used.unsqueeze(2) & used.unsqueeze(1)
    score = torch.where(both, score, score.amin((1, 2), keepdim=True) - 1)
    slot = torch.zeros(networks, width, dtype=torch.int64, device=own.device)
    for _ in range(width):
        row, column = (part.unsqueeze(1) for part in _largest(score))
        slot = slot.scatter(1, row, column)
        score = score.scatter(1, row.unsqueeze(2).expand(-1, -1, width), -torch.inf)
        score = score.scatter(2, column.unsqueeze(1).expand(-1, width, -1), -torch.inf)
    return slot


def _largest(score: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of the largest entry of each matrix, [J] each."""
    place = score.flatten(1).argmax(1)
    return place // score.shape[2], place % score.shape[2]


class _Matching:
    """Who is matched to which global unit so far."""

    def __init__(self, vectors: Tensor, used: Tensor, weight: Tensor, prior: Prior) -> None:
        clients, width, _ = vectors.shape
        self.prior, self.clients = prior, clients
        self.precision = weight / prior.sigma**2  # [J]
        self.scaled = vectors * self.precision[:, None, None]  # v / s
        self.used = used.cpu()
        self.sum = torch.zeros_like(vectors[0])  # S, [W, D]
        self.total = torch.zeros_like(vectors[0, :, 0])  # P, [W]
        self.count = torch.zeros(width, dtype=torch.int64)
        self.slot = torch.arange(width).repeat(clients, 1)

    def place(self, client: int) -> None:
        """Matches a client to those that are in already."""
        # here: it takes long to load, and few methods need it
        from scipy.optimize import linear_sum_assignment

        own, taken = torch.nonzero(self.used[client]).flatten(), torch.nonzero(self.count).flatten()
        free = torch.nonzero(self.count == 0).flatten()
        if len(taken):
            rows, columns = linear_sum_assignment(
                self.gain(client, own, taken, len(free)).numpy(), maximize=True
            )
            # Every order of the new units gains the same. Rounding must not decide which one is
            # taken, or engines would
            # give networks with units in different orders: new units stay in the order that the
            # client has.
            new = columns >= len(taken)
            columns[new] = sorted(columns[new])
            chosen = torch.cat([taken, free])[torch.as_tensor(columns)]
            own = own[torch.as_tensor(rows)]
        else:
            chosen = own
        left = torch.ones(len(self.count), dtype=torch.bool)
        left[chosen] = False
        self.slot[client, own] = chosen
        self.slot[client, ~self.used[client]] = torch.nonzero(left).flatten()
        self._count_in(client, 1)

    def take_out(self, client: int) -> None:
        """Forgets a client."""
        self._count_in(client, -1)

    def gain(self, client: int, own: Tensor, taken: Tensor, free: int) -> Tensor:
        """What the client's units gain as each of the units that are there, and as new ones, [own,
        taken + free].
        """
        clients, flat, precision = self.clients, self.prior.sigma0**-2, self.precision[client]
        v, s, total = self.scaled[client, own], self.sum[taken], self.total[taken]
        length, sums = (v**2).sum(1, keepdim=True), (s**2).sum(1)
        old = (length + 2 * v @ s.T + sums) / (flat + precision + total) - sums / (flat + total)
        count = self.count[taken].double()
        rank = torch.arange(1, min(len(own), free) + 1, dtype=torch.float64)
        new = (
            (length / (flat + precision)).cpu()
            - 2 * rank.log()
            + 2 * torch.tensor(self.prior.gamma / clients).log()
        )
        return torch.cat([old.cpu() + 2 * (count / (clients - count)).log(), new], 1)

    def _count_in(self, client: int, sign: int) -> None:
        own = torch.nonzero(self.used[client]).flatten()
        slot = self.slot[client, own]
        self.count[slot] += sign
        self.sum[slot] += sign * self.scaled[client, own]
        self.total[slot] += sign * self.precision[client]
