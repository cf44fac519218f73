"""Finds runs that can be trained in one batch, and trains one round of all of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import fields
from typing import NamedTuple

import torch

from ...core.algorithm import Algorithm
from ...core.types import RoundReport
from ...engines.local.local_engine import LocalEngine
from ...engines.local.run_visits import NOT_PASSED_PER_VISIT, concatenate_data, run_visits
from ...errors import FedEnsembleError
from ...federation.federation import Federation
from .run_stack import FEWEST, DoesNotFit, NotStackable, RunStack, stack_key

logger = logging.getLogger("fedensemble")

# Limits on the concatenated data of a group: a fraction of the free GPU memory, bytes on the CPU.
_GPU_FRACTION = 0.2
_CPU_BYTES = 4 << 30


class Group(NamedTuple):
    """Runs that train in one batch."""

    indices: list[int]
    stack: RunStack | None = None  # if the server's step is computed for all of them at once


class Groups:
    """Groups of runs that train in one batch; computed again when the set of runs changes."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], list[Group]] = {}  # by the indices of all runs
        # Types of algorithms that failed in a batch of runs with different hyperparameters.
        self._unbatchable: set[Hashable] = set()
        # Types of algorithms whose runs were not computed as one stack.
        self._unstackable: set[Hashable] = set()

    def advance(self, runs: dict[int, Federation]) -> list[tuple[int, RoundReport | Exception]]:
        """Trains one round of each run; returns the report or the error of each run, by index."""
        groups = self._groups.get(tuple(runs))
        if groups is None:
            # Stacks of earlier sets of runs would keep their states in memory.
            self._groups = {tuple(runs): (groups := self._find_groups(runs))}
        outcomes: list[tuple[int, RoundReport | Exception]] = []
        for indices, stack in groups:
            federations = [runs[index] for index in indices]
            reports = None if stack is None else self._train_stack(stack)
            outcomes += zip(indices, reports or self._train_round(federations), strict=True)
        return outcomes

    def _find_groups(self, runs: dict[int, Federation]) -> list[Group]:
        """Returns the indices of the runs of each group, and concatenates each group's data."""
        by_key: dict[Hashable, list[int]] = {}
        for index, federation in runs.items():
            key = batch_key(federation, self._unbatchable) or ("alone", index)
            by_key.setdefault(key, []).append(index)
        parts = [part for indices in by_key.values() for part in _split_by_size(indices, runs)]
        for indices in parts:
            concatenate_data(_engines([runs[index] for index in indices]))
        return [group for indices in parts for group in self._stack(indices, runs)]

    def _stack(self, indices: list[int], runs: dict[int, Federation]) -> list[Group]:
        """Divides runs that could train in one batch into stacks, or leaves them as they are.

        A batch of all runs trains faster than several smaller ones, but each of its runs takes time
        of its own. So stacks pay off only if they are not too small.
        """
        stacks: dict[Hashable, list[int]] = {}
        for index in indices:
            key = stack_key(runs[index])
            if key is None or type(runs[index].algorithm) in self._unstackable:
                return [Group(indices)]
            stacks.setdefault(key, []).append(index)
        if len(indices) < FEWEST * len(stacks):
            return [Group(indices)]
        return [
            Group(part, RunStack([runs[index] for index in part]) if len(part) > 1 else None)
            for part in stacks.values()
        ]

    def _train_stack(self, stack: RunStack) -> list[RoundReport | Exception] | None:
        """Trains one round of a stack; returns None if it cannot be trained as one."""
        started = time.perf_counter()
        try:
            outcomes: list[RoundReport | Exception] = [*stack.train_round()]
        except DoesNotFit:
            return None
        except NotStackable as error:
            # They train without a stack from here on, which raises the error again if it has
            # another cause than the stack.
            logger.debug("Runs are not stacked: %s", error)
            self._unstackable.add(type(stack.federations[0].algorithm))
            self._groups.clear()
            return None
        except FedEnsembleError as error:
            return [error] * len(stack.federations)
        _count_time(stack.federations, started)
        return outcomes

    def _train_round(self, federations: list[Federation]) -> list[RoundReport | Exception]:
        """Trains one round of the runs of a group, and returns their reports or errors."""
        started = time.perf_counter()
        requests = [federation.next_request() for federation in federations]
        try:
            if len(federations) == 1:
                results = [federations[0].engine.run_visits(*requests[0])]
            else:
                results = run_visits(_engines(federations), requests)
        except FedEnsembleError as error:
            return [error] * len(federations)
        except (RuntimeError, TypeError, ValueError):
            # In a batch of runs with different hyperparameters, these are tensors with one value
            # per client. Python control flow on them ("if self.mu > 0") fails. Train the runs one
            # by one, and never batch this algorithm with different hyperparameters again.
            if len({federation.algorithm for federation in federations}) == 1:
                raise
            self._unbatchable.add(type(federations[0].algorithm))
            self._groups.clear()
            return [outcome for each in federations for outcome in self._train_round([each])]
        for federation in federations:
            # All runs prepare their next round before the first of them waits for the GPU.
            if federation.model.device.type == "cuda":
                federation.prefetch_round()
        outcomes: list[RoundReport | Exception] = []
        for federation, result in zip(federations, results, strict=True):
            try:
                outcomes.append(federation.run_round(result))
            except FedEnsembleError as error:
                outcomes.append(error)
        _count_time(federations, started)
        return outcomes


def _count_time(federations: Sequence[Federation], started: float) -> None:
    """Divides the time of a round among the runs that trained together."""
    seconds = (time.perf_counter() - started) / len(federations)
    for federation in federations:
        federation.seconds += seconds
        federation.trained_together = max(federation.trained_together, len(federations))


def _engines(federations: Sequence[Federation]) -> list[LocalEngine]:
    engines = (federation.engine for federation in federations)
    return [engine for engine in engines if isinstance(engine, LocalEngine)]


def batch_key(federation: Federation, unbatchable: Collection[Hashable] = ()) -> Hashable:
    """Returns a key that is equal for runs which can train in one batch; None for a single run.

    The runs must also have the same model, training and engine settings.

    Args:
        federation: of the run.
        unbatchable: types of algorithms that need equal hyperparameters in a batch.
    """
    engine, data, model = federation.engine, federation.data, federation.model
    if not isinstance(engine, LocalEngine) or not engine.batched:
        return None
    # The engine takes the initial personal parts of a run from its algorithm.
    if federation.personal:
        return None
    if data.x.nbytes > _max_data_bytes(model.device) / 4:
        return None
    data_format = (
        data.x.shape[1:],
        data.x.dtype,
        data.y.shape[1:],
        data.y.dtype,
        data.classes,
        data.standardise,
    )
    exact = type(federation.algorithm) in unbatchable
    return federation.work, data_format, _algorithm_key(federation.algorithm, exact)


def _split_by_size(indices: Sequence[int], runs: Mapping[int, Federation]) -> list[list[int]]:
    """Splits runs with equal `batch_key` into groups whose concatenated data fit into memory.

    Data that several runs share, or that are concatenated already, count once.
    """
    if len(indices) == 1:
        return [list(indices)]
    max_bytes = _max_data_bytes(runs[indices[0]].model.device)
    groups: list[list[int]] = [[]]
    bytes_by_data: dict[tuple[int, int], int] = {}
    for index, engine in zip(indices, _engines([runs[index] for index in indices]), strict=True):
        arrays = (id(engine.data.x), id(engine.data.y))
        bytes_by_data[arrays] = engine.data.x.nbytes
        if groups[-1] and len(bytes_by_data) > 1 and sum(bytes_by_data.values()) > max_bytes:
            groups.append([])
            bytes_by_data = {arrays: engine.data.x.nbytes}
        groups[-1].append(index)
    return groups


def _max_data_bytes(device: torch.device) -> float:
    """Returns the maximum size of the concatenated data of a group."""
    if device.type == "cpu":
        return _CPU_BYTES
    return _GPU_FRACTION * torch.cuda.mem_get_info(device)[0]


def _algorithm_key(algorithm: Algorithm, exact: bool) -> Hashable:
    """Returns a key of the algorithm, without the hyperparameters that may differ in a batch.

    Args:
        algorithm: of a run.
        exact: whether all hyperparameters must be equal.
    """
    if exact:
        return algorithm
    values = {field.name: getattr(algorithm, field.name) for field in fields(algorithm)}
    return type(algorithm), *(
        (name, value)
        for name, value in values.items()
        if not isinstance(value, float) and name not in NOT_PASSED_PER_VISIT
    )
