"""Which runs fit into one program, and one round of all of them."""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import fields

import torch

from ..core.algorithm import Algorithm
from ..core.types import RoundReport
from ..engines.local.local_engine import LocalEngine
from ..engines.local.run_visits import RATES, concatenate_data, run_visits
from ..errors import FedEnsembleError
from ..federation.federation import Federation

_SHARE = 0.2  # of a device's free memory that data put together may take
_ON_CPU = 4 << 30


class Groups:
    """Which runs fit into one program; found when they change."""

    def __init__(self) -> None:
        self._of: dict[tuple[int, ...], list[list[int]]] = {}
        self._apart: set[Hashable] = set()

    def advance(self, runs: dict[int, Federation]) -> list[tuple[int, RoundReport | Exception]]:
        """One more round of each run, or what went wrong in it."""
        together = self._of.get(tuple(runs))
        if together is None:
            together = self._of[tuple(runs)] = self._find(runs)
        outcomes: list[tuple[int, RoundReport | Exception]] = []
        for places in together:
            outcomes += zip(places, self._round([runs[place] for place in places]), strict=True)
        return outcomes

    def _find(self, runs: dict[int, Federation]) -> list[list[int]]:
        found: dict[Hashable, list[int]] = {}
        for place, federation in runs.items():
            found.setdefault(kind(federation, self._apart) or ("alone", place), []).append(place)
        groups = [part for places in found.values() for part in _parts(places, runs)]
        for places in groups:
            concatenate_data(_engines([runs[place] for place in places]))
        return groups

    def _round(self, federations: list[Federation]) -> list[RoundReport | Exception]:
        started = time.perf_counter()
        requests = [federation.ask() for federation in federations]
        try:
            if len(federations) == 1:
                answers = [federations[0].engine.visit(*requests[0])]
            else:
                answers = run_visits(_engines(federations), requests)
        except FedEnsembleError as error:
            return [error] * len(federations)
        except (RuntimeError, TypeError, ValueError):
            # A method may look at its numbers ("if self.mu > 0"), which cannot be done for several
            # runs at once.
            if len({federation.algorithm for federation in federations}) == 1:
                raise
            self._apart.add(type(federations[0].algorithm))
            self._of.clear()
            return [outcome for federation in federations for outcome in self._round([federation])]
        for federation in federations:
            if federation.learner.device.type == "cuda":  # which is busy now
                federation.foresee()
        outcomes: list[RoundReport | Exception] = []
        for federation, request, answer in zip(federations, requests, answers, strict=True):
            try:
                outcomes.append(federation.conclude(request, answer))
            except FedEnsembleError as error:
                outcomes.append(error)
        for federation in federations:
            federation.seconds += (time.perf_counter() - started) / len(federations)
        return outcomes


def _engines(federations: Sequence[Federation]) -> list[LocalEngine]:
    engines = (federation.engine for federation in federations)
    return [engine for engine in engines if isinstance(engine, LocalEngine)]


def kind(federation: Federation, apart: Collection[Hashable] = ()) -> Hashable:
    """Runs of the same model, training and engine that are also of the same kind can train in one
    block; None never.
    """
    engine, data, learner = federation.engine, federation.data, federation.learner
    if not isinstance(engine, LocalEngine) or not engine.batched:
        return None
    if data.x.nbytes > _room(learner.device) / 4:
        return None
    facts = (
        data.x.shape[1:],
        data.x.dtype,
        data.y.shape[1:],
        data.y.dtype,
        data.classes,
        data.standardise,
    )
    return (
        federation.work,
        facts,
        _method(federation.algorithm, type(federation.algorithm) in apart),
    )


def _parts(places: Sequence[int], runs: Mapping[int, Federation]) -> list[list[int]]:
    """Runs of one kind in parts whose data there is room for, put together; data that are together
    cost nothing.
    """
    if len(places) == 1:
        return [list(places)]
    room = _room(runs[places[0]].learner.device)
    parts: list[list[int]] = [[]]
    held: dict[tuple[int, int], int] = {}
    for place, engine in zip(places, _engines([runs[place] for place in places]), strict=True):
        arrays = (id(engine.data.x), id(engine.data.y))
        held[arrays] = engine.data.x.nbytes
        if parts[-1] and len(held) > 1 and sum(held.values()) > room:
            parts.append([])
            held = {arrays: engine.data.x.nbytes}
        parts[-1].append(place)
    return parts


def _room(device: torch.device) -> float:
    """Bytes that data put together may take."""
    return _ON_CPU if device.type == "cpu" else _SHARE * torch.cuda.mem_get_info(device)[0]


def _method(algorithm: Algorithm, whole: bool) -> Hashable:
    """A method without the numbers that may differ between runs."""
    if whole:
        return algorithm
    named = {field.name: getattr(algorithm, field.name) for field in fields(algorithm)}
    return type(algorithm), *(
        (n, v) for n, v in named.items() if not isinstance(v, float) and n not in RATES
    )
