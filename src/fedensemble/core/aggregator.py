"""Aggregators: how the server combines the uploads of a mode's clients.

The default is the weighted mean. Robust aggregators tolerate a minority of malicious clients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from ..errors import InputError, setting
from ..flat_params import Tree, select_rows
from ..registry import Registry
from .algorithm import Algorithm, algorithms
from .probe import expected_uploads
from .types import GatheredUploads, RoundResult

aggregators: Registry[type[Aggregator]] = Registry("aggregator", builtins="robust")

# The key of running statistics among uploads. No upload has this name, because the names of an
# algorithm's uploads are Python identifiers.
STATISTICS = "running statistics"
SMALLEST_MAJORITY = 3  # with fewer clients per mode no rule can tell which one is malicious

Method = TypeVar("Method", bound=Algorithm)


@dataclass(frozen=True, kw_only=True)
class Aggregator(ABC):
    """A rule that computes the update of one mode from the changes that its clients uploaded.

    A *change* is an upload minus what a client that learns nothing would upload. For FedAvg it is
    the client's model minus the model that it received. Running statistics are one more tensor of
    changes. A rule sees one mode at a time.
    """

    gathers: ClassVar[bool] = True  # needs the upload of every client; the mean does not
    by_coordinate: ClassVar[bool] = False  # combines each coordinate separately

    @abstractmethod
    def combine(self, changes: Tree, weight: Tensor) -> Tree:
        """The update of one mode, [P] per tensor.

        Args:
            changes: changes of the mode's n clients in ascending order of clients, [n, P] per
                tensor.
            weight: aggregation weights of these clients, [n].
        """


@aggregators.register("mean")
@dataclass(frozen=True, kw_only=True)
class Mean(Aggregator):
    """The weighted mean, the default. One malicious client can move it anywhere."""

    gathers = False

    def combine(self, changes: Tree, weight: Tensor) -> Tree:
        share = weight / weight.sum()
        return {name: share.to(change.dtype) @ change for name, change in changes.items()}


MEAN = Mean()


def gathering(algorithm: Method) -> Method:
    """A copy of the algorithm for which engines keep the upload of each client.

    Engines read `algorithm.gathers`, a class attribute. The copy overrides it on the instance, so
    that engines do not need to know about aggregators. Dataclass fields do not change, and so
    neither do equality and saved files.
    """
    gathering_copy = copy(algorithm)
    object.__setattr__(gathering_copy, "gathers", True)
    return gathering_copy


def check_aggregator(aggregator: Aggregator, algorithm: Algorithm, theta: Tensor) -> None:
    """Raises if the algorithm's server step needs the mean and the aggregator is another one.

    Args:
        theta: parameters of one model, [P]; only their number and dtype matter.
    """
    if not aggregator.gathers:
        return
    rule = aggregators.name_of(type(aggregator)) or type(aggregator).__name__
    name = algorithms.name_of(type(algorithm)) or type(algorithm).__name__
    advice = (
        "Use aggregator 'mean', or an algorithm such as fedavg, fedprox, fedavgm, fedadam, fedyogi "
        "or fedac."
    )
    if type(algorithm).gathers:
        raise InputError(
            f"Aggregator '{rule}' cannot be used with algorithm '{name}', whose server combines "
            f"the clients' models in its own way. {advice}"
        )
    if algorithm.joint:
        raise InputError(
            f"Aggregator '{rule}' cannot be used with algorithm '{name}', whose clients upload "
            f"several modes, or one of their choice, at once. {advice}"
        )
    if algorithm.init_client_state(theta) and not algorithm.private_state:
        raise InputError(
            f"Aggregator '{rule}' cannot be used with algorithm '{name}': its server tracks the "
            "mean of the clients' states, and a robust aggregate is not that mean, so the two "
            f"drift apart. {advice}"
        )
    if aggregator.by_coordinate and algorithm.quantised:
        raise InputError(
            f"Aggregator '{rule}' cannot be used with algorithm '{name}': most coordinates of a "
            "compressed upload are zero, and so is their median. Use 'geometric-median', 'krum', "
            "'multi-krum' or 'centered-clipping'."
        )


def few_clients(aggregator: Aggregator, per_mode: float) -> str:
    """A warning if fewer than 3 clients train a mode per round; empty if there are enough.

    Args:
        per_mode: mean number of clients that train a mode in a round.
    """
    if not aggregator.gathers or per_mode >= SMALLEST_MAJORITY:
        return ""
    rule = aggregators.name_of(type(aggregator)) or type(aggregator).__name__
    return (
        f"About {per_mode:g} client{'s' * (per_mode != 1)} train{'s' * (per_mode == 1)} a mode "
        f"per round: with fewer than {SMALLEST_MAJORITY} no aggregator can tell which client is "
        f"malicious, and '{rule}' protects little. Raise "
        f"{setting('ensemble.clients_per_round')} or lower {setting('ensemble.modes')}."
    )


def aggregate(
    aggregator: Aggregator, algorithm: Algorithm, sent: Tree, buffers: Tensor, returned: RoundResult
) -> RoundResult:
    """The result of a round with the aggregator's updates instead of the weighted means.

    Args:
        sent: what was broadcast, one row per mode, [K, P].
        buffers: running statistics of each mode, [K, R].
        returned: the engine's result, with the uploads of all clients.
    """
    members = returned.cohort.members
    if members is None:
        return returned
    unchanged = expected_uploads(algorithm, sent, buffers, returned.cohort.shared_draw)
    uploads = {name: torch.zeros_like(value) for name, value in unchanged.items()}
    statistics = buffers.clone()
    for mode in sorted(set(members.mode.tolist())):
        visits = torch.nonzero(members.mode == mode).flatten()
        changes = changes_of(members, visits, unchanged, buffers, mode)
        update = aggregator.combine(changes, members.weight[visits])
        statistics[mode] += update.pop(STATISTICS)
        for name, change in update.items():
            uploads[name][mode] = unchanged[name][mode] + change
    return returned._replace(uploads=uploads, buffers=statistics)


def changes_of(
    members: GatheredUploads, visits: Tensor, unchanged: Tree, buffers: Tensor, mode: int
) -> Tree:
    """The changes of some visits to one mode, running statistics included, [n, ...] per tensor.

    Args:
        visits: indices of the visits, [n].
        unchanged: what a client that learns nothing would upload for each mode, [K, P].
        buffers: running statistics of each mode, [K, R].
    """
    changes = {
        name: value - unchanged[name][mode]
        for name, value in select_rows(members.uploads, visits).items()
    }
    return {**changes, STATISTICS: members.buffers[visits] - buffers[mode]}
