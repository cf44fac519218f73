"""Checks that an algorithm and a schedule can train shared parameters, see `shared.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import prng
from ...errors import InputError, setting
from ...flat_params import Tree
from ..algorithm import Algorithm, algorithms
from ..probe import probe
from ..schedule import Schedule, schedules
from ..types import Cohort
from ..visits.traffic import bytes_up


def check_sharing(algorithm: Algorithm, schedule: Schedule, theta: Tensor) -> None:
    """Raises if modes that this algorithm and this schedule train cannot share parameters.

    Args:
        theta: parameters of one model, [P]; only their number and dtype matter.
    """
    shared = setting("ensemble.shared")
    if schedule.trains_apart:
        name = schedules.name_of(type(schedule)) or type(schedule).__name__
        raise InputError(
            f"Schedule '{name}' trains every mode as a run of its own, and {shared} would join "
            "them. Use schedule 'stratified' or 'balanced', or share nothing."
        )
    if (reason := _reason_against(algorithm, theta)) is not None:
        name = algorithms.name_of(type(algorithm)) or type(algorithm).__name__
        raise InputError(
            f"Algorithm '{name}' cannot be used with {shared}: {reason}. Use fedavg, fedprox, "
            "anchored, fedavgm, fedadagrad, fedadam, fedyogi, fedac, qsgd or ditto, or share "
            "nothing."
        )


def check_server_update(algorithm: Algorithm, theta: Tensor) -> None:
    """Raises if the server's update of a parameter depends on the values of other parameters.

    The shared parameters are updated together with entries that have no meaning. A norm over the
    whole vector, for example, would let these entries into the shared ones.

    Args:
        theta: parameters of one model, [P]; only their number and dtype matter.
    """
    messages = probe(algorithm, theta)
    name = type(algorithm).__name__
    one = theta.new_ones(1, 1)
    cohort = Cohort(3 * one, 3 * one, one / 2, 6, one / 2, lr=algorithm.learning_rate(0))
    changed = torch.arange(len(theta), device=theta.device) % 2 == 1

    def update(others: int) -> Tree:
        """The server's update if every second entry of all vectors is drawn with `others`."""

        def fill(tree: Tree, word: int) -> Tree:
            filled = {}
            for index, name in enumerate(tree):
                kept, drawn = (
                    _draw(prng.key(0, "sharing", word, index, n), theta) for n in (0, others)
                )
                filled[name] = torch.where(changed, drawn, kept).unsqueeze(0)
            return filled

        return algorithm.server_update(fill(messages.mode, 0), fill(messages.uploads, 1), cohort)

    first, second = update(1), update(2)
    for entry in first:
        pair = (tree[entry].expand(1, len(theta))[:, ~changed] for tree in (first, second))
        if not torch.equal(*pair):
            raise InputError(
                f"{name} cannot be used with {setting('ensemble.shared')}: its server_update of "
                f"'{entry}' depends on the values of other parameters, and shared parameters must "
                "be updated on their own. Share nothing, or make it elementwise."
            )


def _reason_against(algorithm: Algorithm, theta: Tensor) -> str | None:
    """Why an algorithm cannot train shared parameters, or None if it can."""
    # The class decides: an aggregator sets `gathers` on a copy of any algorithm.
    if type(algorithm).gathers:
        return "its server combines the clients' whole models of each mode"
    if algorithm.joint:
        return "its clients receive all modes at once"
    if algorithm.couples:
        return "its server changes whole modes after the update"
    if algorithm.init_client_state(theta) and not algorithm.private_state:
        return (
            "its clients keep a state for each mode, of which the server tracks the mean, and "
            "shared parameters would need one state for all modes"
        )
    for name, value in algorithm.init_mode(theta).items():
        # A count of rounds, say, would be that of one mode, not that of all visits.
        if value.shape[-1:] != theta.shape[-1:]:
            return f"its server keeps '{name}' of {value.shape[-1]} values for each whole mode"
    messages = probe(algorithm, theta)
    if not int(bytes_up(algorithm, messages.uploads, messages.sent, torch.ones(1))):
        return "its clients upload nothing"
    for name, value in messages.uploads.items():
        if value.shape[-1:] != theta.shape[-1:]:
            return f"its clients upload '{name}' of {value.shape[-1]} values for a whole mode"
    return None


def _draw(key: prng.Key, like: Tensor) -> Tensor:
    """Random values in (0, 1), [P]; positive, because they also stand for mean squares."""
    return torch.as_tensor(prng.uniform(key, len(like))).reshape(-1).to(like)
