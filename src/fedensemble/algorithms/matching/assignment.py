"""Matches the hidden units of several networks: MAP assignment under a Beta-Bernoulli process.

Clients' units v_jl are noisy copies, N(u_i, sigma_j^2), of global units u_i ~ N(0, sigma0^2). A
Beta-Bernoulli process with mass gamma decides which client has which global units. Given the
assignment of all other clients, assigning unit l of client j to global unit i adds to the log
posterior (times 2)

||v_jl/s_j + S_i||^2 / (1/s0 + 1/s_j + P_i) - ||S_i||^2 / (1/s0 + P_i) + 2 log(n_i / (J - n_i))

if n_i > 0 other clients have unit i, and as the r-th new unit

||v_jl/s_j||^2 / (1/s0 + 1/s_j) - 2 log r + 2 log(gamma / J),

where s = sigma^2, and S_i and P_i are the sums of v/s and 1/s over the other clients' units that
are matched to i. The Hungarian algorithm finds the best assignment of one client; clients take
turns.

Reference: Yurochkin, Agarwal, Ghosh, Greenewald, Hoang, Khazaeni, "Bayesian nonparametric federated
learning of neural networks", ICML 2019, equations 8 and 9, with prior mean 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Prior:
    """Parameters of the prior over units.

    Args:
        sigma: standard deviation of a client's unit around the global unit, for a client of mean
            weight; for a client of relative weight w it is sigma / sqrt(w).
        sigma0: standard deviation of global units around 0.
        gamma: mass of the Beta-Bernoulli process; the larger, the more units of their own clients
            have.
    """

    sigma: float
    sigma0: float
    gamma: float


def match_units(vectors: Tensor, used: Tensor, weight: Tensor, prior: Prior, sweeps: int) -> Tensor:
    """The global unit of each client's unit, [J, W]; every row is a permutation.

    Clients are matched one after another, and the first one keeps its order. Then each client is
    matched again to all others, `sweeps` times or until nothing changes. Units that a client does
    not use get the global units that are left over.

    Args:
        vectors: features of the units, by which they are compared, [J, W, D].
        used: which units a client uses, [J, W]; W is also the maximum number of global units.
        weight: of the clients, [J].
    """
    matching = _Matching(vectors.double(), used, weight.double() / weight.double().mean(), prior)
    for client in range(len(vectors)):
        matching.add(client)
    for _ in range(sweeps if len(vectors) > 1 else 0):
        before = matching.slot.clone()
        for client in range(len(vectors)):
            matching.remove(client)
            matching.add(client)
        if torch.equal(matching.slot, before):
            break
    return matching.slot


def nearest_units(own: Tensor, other: Tensor, own_used: Tensor, other_used: Tensor) -> Tensor:
    """The unit of another network that each own unit is matched to, [J, W]; rows are permutations.

    The matching is greedy: the closest pair of units is matched first, then the closest pair of the
    units that are left, and so on. Pairs with an unused unit come last. Unlike the Hungarian
    algorithm, this consists of tensor operations, so it can run in a batch of clients and on any
    device. Both algorithms agree if each own unit is a slightly changed copy of another unit.

    Args:
        own, other: features of the units, by which they are compared, [J, W, D].
        own_used, other_used: which units the networks use, [J, W].

    >>> other, all_used = torch.tensor([[[0.0], [5.0], [9.0]]]), torch.ones(1, 3).bool()
    >>> nearest_units(other.flip(1) + 0.1, other, all_used, all_used).tolist()
    [[2, 1, 0]]
    """
    networks, width, _ = own.shape
    score = -torch.cdist(own, other)
    both_used = own_used.unsqueeze(2) & other_used.unsqueeze(1)
    # Below all other scores, but still above those of units that are already matched.
    score = torch.where(both_used, score, score.amin((1, 2), keepdim=True) - 1)
    slot = torch.zeros(networks, width, dtype=torch.int64, device=own.device)
    for _ in range(width):
        row, column = (index.unsqueeze(1) for index in _argmax_2d(score))
        slot = slot.scatter(1, row, column)
        # Exclude the pair's row and column from all later matches.
        score = score.scatter(1, row.unsqueeze(2).expand(-1, -1, width), -torch.inf)
        score = score.scatter(2, column.unsqueeze(1).expand(-1, width, -1), -torch.inf)
    return slot


def _argmax_2d(score: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of the largest entry of each matrix, [J] each."""
    position = score.flatten(1).argmax(1)
    return position // score.shape[2], position % score.shape[2]


class _Matching:
    """The current assignment of clients' units to global units, and its sufficient statistics."""

    def __init__(self, vectors: Tensor, used: Tensor, weight: Tensor, prior: Prior) -> None:
        clients, width, _ = vectors.shape
        self.prior, self.clients = prior, clients
        self.precision = weight / prior.sigma**2  # 1 / s_j, [J]
        self.scaled = vectors * self.precision[:, None, None]  # v / s, [J, W, D]
        self.used = used.cpu()
        self.sum = torch.zeros_like(vectors[0])  # S, [W, D]
        self.total_precision = torch.zeros_like(vectors[0, :, 0])  # P, [W]
        self.count = torch.zeros(width, dtype=torch.int64)  # n, [W]
        self.slot = torch.arange(width).repeat(clients, 1)  # global unit of each unit, [J, W]

    def add(self, client: int) -> None:
        """Matches a client to the clients that have been added before."""
        # Imported here, because it takes long and only these algorithms need it.
        from scipy.optimize import linear_sum_assignment

        own = torch.nonzero(self.used[client]).flatten()
        taken = torch.nonzero(self.count).flatten()
        free = torch.nonzero(self.count == 0).flatten()
        if len(taken):
            rows, columns = linear_sum_assignment(
                self.gain(client, own, taken, len(free)).numpy(), maximize=True
            )
            # All orders of the new units have the same gain. If rounding decided between them, two
            # engines would return networks with their units in different orders. So new units stay
            # in the client's order.
            new = columns >= len(taken)
            columns[new] = sorted(columns[new])
            assigned = torch.cat([taken, free])[torch.as_tensor(columns)]
            own = own[torch.as_tensor(rows)]
        else:
            assigned = own
        left_over = torch.ones(len(self.count), dtype=torch.bool)
        left_over[assigned] = False
        self.slot[client, own] = assigned
        self.slot[client, ~self.used[client]] = torch.nonzero(left_over).flatten()
        self._update_statistics(client, 1)

    def remove(self, client: int) -> None:
        """Removes a client from the statistics."""
        self._update_statistics(client, -1)

    def gain(self, client: int, own: Tensor, taken: Tensor, free: int) -> Tensor:
        """Gain in log posterior of each unit as each taken and new unit, [own, taken + new]."""
        clients, prior_precision = self.clients, self.prior.sigma0**-2
        precision, v = self.precision[client], self.scaled[client, own]
        s, total = self.sum[taken], self.total_precision[taken]
        v_squared, s_squared = (v**2).sum(1, keepdim=True), (s**2).sum(1)
        old = (v_squared + 2 * v @ s.T + s_squared) / (
            prior_precision + precision + total
        ) - s_squared / (prior_precision + total)
        count = self.count[taken].double()
        rank = torch.arange(1, min(len(own), free) + 1, dtype=torch.float64)
        new = (
            (v_squared / (prior_precision + precision)).cpu()
            - 2 * rank.log()
            + 2 * torch.tensor(self.prior.gamma / clients).log()
        )
        return torch.cat([old.cpu() + 2 * (count / (clients - count)).log(), new], 1)

    def _update_statistics(self, client: int, sign: int) -> None:
        """Adds (sign 1) or subtracts (sign -1) a client's units."""
        own = torch.nonzero(self.used[client]).flatten()
        slot = self.slot[client, own]
        self.count[slot] += sign
        self.sum[slot] += sign * self.scaled[client, own]
        self.total_precision[slot] += sign * self.precision[client]
