"""How the server combines what a mode's clients sent: the weighted mean, or a rule that outvotes
malicious clients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from ..errors import InputError
from ..flat_params import Tree, rows
from ..registry import Registry
from .algorithm import Algorithm, algorithms
from .probe import expected_uploads
from .types import Members, RoundResult

aggregators: Registry[type[Aggregator]] = Registry("aggregator")

STATISTICS = "running statistics"  # no upload has this name: a method's own are Python names
SMALLEST_MAJORITY = 3  # clients of a mode below which no rule can tell who is lying

Method = TypeVar("Method", bound=Algorithm)


@dataclass(frozen=True, kw_only=True)
class Aggregator(ABC):
    """A rule that makes one update of a mode from the changes that its clients sent.

    A *change* is an upload less what a client that learns nothing would upload: for FedAvg, the
    client's model less the model it was sent. Running statistics are one more tensor of changes. A
    rule sees one mode at a time.
    """

    gathers: ClassVar[bool] = True  # whether it needs every client's upload; the mean does not
    by_coordinate: ClassVar[bool] = False  # whether every coordinate is combined by itself

    @abstractmethod
    def combine(self, changes: Tree, weight: Tensor) -> Tree:
        """One mode's update, [P] for each tensor.

        Args:
            changes: what the mode's n clients sent, in ascending order of clients, [n, P] for each
                tensor.
            weight: their aggregation weights, [n].
        """


@aggregators.register("mean")
@dataclass(frozen=True, kw_only=True)
class Mean(Aggregator):
    """The weighted mean, the default; one malicious client can move it anywhere."""

    gathers = False

    def combine(self, changes: Tree, weight: Tensor) -> Tree:
        share = weight / weight.sum()
        return {name: share.to(change.dtype) @ change for name, change in changes.items()}


MEAN = Mean()


def gathering(algorithm: Method) -> Method:
    """The same method, for which engines keep what each client sent.

    Engines ask `algorithm.gathers`, a constant of the class. The copy has a value of its own, so
    that no engine has to know of aggregators. Fields, and with them equality and what is saved,
    stay as they are.
    """
    other = copy(algorithm)
    object.__setattr__(other, "gathers", True)
    return other


def check_aggregator(aggregator: Aggregator, algorithm: Algorithm, theta: Tensor) -> None:
    """Raises where a method's server needs the mean itself.

    Args:
        theta: weights of one model, [P]; only their number and type count.
    """
    if not aggregator.gathers:
        return
    rule = aggregators.name_of(type(aggregator)) or type(aggregator).__name__
    name = algorithms.name_of(type(algorithm)) or type(algorithm).__name__
    advice = "Use aggregator 'mean', or a method such as fedavg, fedprox, fedavgm, fedadam, fedyogi or fedac."
    if type(algorithm).gathers:
        raise InputError(
            f"Aggregator '{rule}' cannot serve algorithm '{name}', whose server combines the clients' models in a way "
            f"of its own. {advice}"
        )
    if algorithm.init_memory(theta):
        raise InputError(
            f"Aggregator '{rule}' cannot serve algorithm '{name}': its server tracks the mean of what clients "
            f"remember, and a robust aggregate is not that mean, so the two drift apart. {advice}"
        )
    if aggregator.by_coordinate and algorithm.quantised:
        raise InputError(
            f"Aggregator '{rule}' cannot serve algorithm '{name}': most coordinates of a compressed upload are zero, "
            "and so is their median. Use 'geometric-median', 'krum', 'multi-krum' or 'centered-clipping'."
        )


def few_clients(aggregator: Aggregator, per_mode: float) -> str:
    """What a user should know where too few clients train a mode per round; empty if there are
    enough.
    """
    if not aggregator.gathers or per_mode >= SMALLEST_MAJORITY:
        return ""
    rule = aggregators.name_of(type(aggregator)) or type(aggregator).__name__
    return (
        f"About {per_mode:g} client{'s' * (per_mode != 1)} train{'s' * (per_mode == 1)} a mode per round: with fewer "
        f"than {SMALLEST_MAJORITY} no aggregator can tell who is malicious, and '{rule}' protects little. Raise "
        "ensemble.clients_per_round or lower ensemble.modes."
    )


def aggregate(
    aggregator: Aggregator, algorithm: Algorithm, sent: Tree, buffers: Tensor, returned: RoundResult
) -> RoundResult:
    """What came back from a round with the aggregator's updates in place of the weighted means.

    Args:
        sent: what was broadcast, one row per mode, [K, P].
        buffers: running statistics of each mode, [K, R].
    """
    members = returned.cohort.members
    if members is None:
        return returned
    still = expected_uploads(algorithm, sent, buffers, returned.cohort.coin)
    uploads = {name: torch.zeros_like(value) for name, value in still.items()}
    statistics = buffers.clone()
    for mode in sorted(set(members.mode.tolist())):
        own = torch.nonzero(members.mode == mode).flatten()
        found = aggregator.combine(
            changes_of(members, own, still, buffers, mode), members.weight[own]
        )
        statistics[mode] += found.pop(STATISTICS)
        for name, change in found.items():
            uploads[name][mode] = still[name][mode] + change
    return returned._replace(uploads=uploads, buffers=statistics)


def changes_of(members: Members, own: Tensor, still: Tree, buffers: Tensor, mode: int) -> Tree:
    """Changes that the visits `own`, all to one mode, sent; running statistics are among them."""
    changes = {
        name: value - still[name][mode] for name, value in rows(members.uploads, own).items()
    }
    return {**changes, STATISTICS: members.buffers[own] - buffers[mode]}
