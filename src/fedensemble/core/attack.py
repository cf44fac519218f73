"""Simulated attacks, for experiments only: malicious clients replace what they upload."""

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
from .probe import expected_uploads
from .types import RoundResult
from .visits.visit_keys import visit_key

attacks: Registry[type[Attack]] = Registry("attack", builtins="robust")


@dataclass(frozen=True, kw_only=True)
class Attack(ABC):
    """An attack by a fixed random set of malicious clients.

    Args:
        share: share of all clients that are malicious; they are the same in every round.
    """

    # whether malicious clients change their uploads; if not, they change only their labels
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
        """True for the malicious ones of N clients, bool [N]."""
        order = torch.argsort(prng.bits(prng.key(seed, "attack"), population), stable=True)
        chosen = torch.zeros(population, dtype=torch.bool)
        chosen[order[: round(self.share * population)]] = True
        return chosen

    def labels(self, y: Tensor, classes: int | None) -> Tensor:
        """The targets that malicious clients train on, instead of their own targets `y`."""
        return y

    @abstractmethod
    def forge(self, own: Tensor, honest: Tensor, key: Tensor) -> Tensor:
        """The changes of one tensor that a mode's m malicious clients upload, [m, P].

        Args:
            own: the changes that the malicious clients trained, [m, P].
            honest: changes of the mode's honest clients, [n - m, P], which colluding clients know.
                If a mode has no honest client, these are `own`.
            key: PRNG key of each malicious client, int64 [m].
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
    """The result of a round with the forged uploads of malicious clients; means are recomputed.

    Args:
        malicious: True for malicious clients, bool [N].
        sent, buffers: what was broadcast, [K, P] and [K, R].
        returned: the engine's result, with the uploads of all clients.
    """
    members = returned.cohort.members
    if members is None:
        return returned
    unchanged = expected_uploads(algorithm, sent, buffers, returned.cohort.shared_draw)
    is_malicious = malicious.to(members.client.device)[members.client]
    uploads = {name: value.clone() for name, value in members.uploads.items()}
    statistics = members.buffers.clone()
    for mode in sorted(set(members.mode[is_malicious].tolist())):
        of_mode = members.mode == mode
        forged, honest = (
            torch.nonzero(of_mode & group).flatten() for group in (is_malicious, ~is_malicious)
        )
        known = changes_of(members, honest if len(honest) else forged, unchanged, buffers, mode)
        trained = changes_of(members, forged, unchanged, buffers, mode)
        keys = visit_key("attack", seed, round, members.client[forged], members.mode[forged])
        for index, (name, own) in enumerate(trained.items()):
            change = attack.forge(own, known[name], torch.as_tensor(prng.fold_in(keys, index)))
            if name == STATISTICS:
                statistics[forged] = buffers[mode] + change
            else:
                uploads[name][forged] = unchanged[name][mode] + change
    forged_members = members._replace(uploads=uploads, buffers=statistics)
    returned = returned._replace(cohort=replace(returned.cohort, members=forged_members))
    return aggregate(MEAN, algorithm, sent, buffers, returned)
