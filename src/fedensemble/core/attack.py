"""Simulated attacks: what malicious clients send in place of what they trained. For experiments,
never for a fleet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from .. import prng
from ..errors import InputError
from ..flat_params import Tree
from ..registry import Registry
from .aggregator import MEAN, STATISTICS, aggregate, changes_of
from .algorithm import Algorithm
from .keys import visit_key
from .probe import expected_uploads
from .types import RoundResult

attacks: Registry[type[Attack]] = Registry("attack")


@dataclass(frozen=True, kw_only=True)
class Attack(ABC):
    """What a fixed random set of clients does to harm the training.

    Args:
        share: of all clients that are malicious, the same ones in every round.
    """

    # whether malicious clients change what they send; otherwise only their labels
    forges: ClassVar[bool] = True

    share: float = 0.1

    def __post_init__(self) -> None:
        if (
            isinstance(self.share, bool)
            or not isinstance(self.share, (int, float))
            or not 0 <= self.share <= 1
        ):
            raise InputError(
                f"{type(self).__name__} needs 0 <= share <= 1; got share={self.share!r}."
            )

    def malicious(self, population: int, seed: int) -> Tensor:
        """Which of N clients are malicious, bool [N]."""
        order = torch.argsort(prng.bits(prng.key(seed, "attack"), population), stable=True)
        chosen = torch.zeros(population, dtype=torch.bool)
        chosen[order[: round(self.share * population)]] = True
        return chosen

    def labels(self, y: Tensor, classes: int | None) -> Tensor:
        """The targets that malicious clients train on, in place of their own targets `y`."""
        return y

    @abstractmethod
    def forge(self, own: Tensor, honest: Tensor, key: Tensor) -> Tensor:
        """The changes that a mode's malicious clients send of one tensor, [m, P].

        Args:
            own: the changes that they trained, [m, P].
            honest: those of the mode's honest clients, [n - m, P]: colluding clients know them.
                Where a mode has no honest client, these are `own`.
            key: of each malicious client's random numbers, int64 [m].
        """


def corrupt(
    attack: Attack,
    malicious: Tensor,
    seed: int,
    round: int,
    algorithm: Algorithm,
    sent: Tree,
    buffers: Tensor,
    returned: RoundResult,
) -> RoundResult:
    """What came back from a round after malicious clients forged their uploads, means included.

    Args:
        malicious: which clients are, bool [N].
        sent, buffers: what was broadcast, [K, P] and [K, R].
    """
    members = returned.cohort.members
    if members is None:
        return returned
    still = expected_uploads(algorithm, sent, buffers, returned.cohort.coin)
    bad = malicious.to(members.client.device)[members.client]
    uploads = {name: value.clone() for name, value in members.uploads.items()}
    statistics = members.buffers.clone()
    for mode in sorted(set(members.mode[bad].tolist())):
        here = members.mode == mode
        forged, honest = (torch.nonzero(here & chosen).flatten() for chosen in (bad, ~bad))
        known = changes_of(members, honest if len(honest) else forged, still, buffers, mode)
        trained = changes_of(members, forged, still, buffers, mode)
        keys = visit_key("attack", seed, round, members.client[forged], members.mode[forged])
        for place, (name, own) in enumerate(trained.items()):
            change = attack.forge(own, known[name], torch.as_tensor(prng.fold(keys, place)))
            if name == STATISTICS:
                statistics[forged] = buffers[mode] + change
            else:
                uploads[name][forged] = still[name][mode] + change
    changed = members._replace(uploads=uploads, buffers=statistics)
    returned = returned._replace(cohort=replace(returned.cohort, members=changed))
    return aggregate(MEAN, algorithm, sent, buffers, returned)
