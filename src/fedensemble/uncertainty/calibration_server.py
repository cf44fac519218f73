"""The server's side of a federated calibration: asks clients for sums, and fits what they say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..errors import InputError
from .calibration import Calibration
from .calibration_client import Answer, Query
from .calibration_settings import CalibrationSettings, Place
from .conformal_scores import CLASS_METHODS, largest_class_score
from .conformal_threshold import BINS, bin_edges, conformal_rank, find_bins, rows_needed
from .scores import score_range
from .temperature import fit_temperature

_UNCERTAINTY_BINS = BINS // 2  # for right and for wrong answers
# Histograms are refined until a bin is as narrow as this share of the range of scores or, where the
# range is that of the largest residual, of the threshold.
_PRECISION = 1e-3
_MORE_ROWS = "hold back more rows (data.calibration), or choose a larger alpha"


class CalibrationClients(Protocol):
    """The clients that have calibration rows."""

    @property
    def rows(self) -> Mapping[int, int]:
        """Number of calibration rows of each client that has some, by its index."""
        ...

    def ask(self, query: Query) -> Mapping[int, Answer]:
        """The answer of each of these clients to a query."""
        ...


class CalibrationFacts(NamedTuple):
    """What the server knows about the ensemble and the clients."""

    task: str
    modes: int
    outputs: int  # per row
    one_label: bool  # per row, and not one per position of a sequence
    clients: int  # of the federation, also those without calibration rows
    class_names: Sequence[str] | None = None
    client_names: Sequence[str] | None = None


class _Scaling(NamedTuple):
    """The temperatures, and the NLL per row before and after."""

    place: Place | None = None
    temperatures: tuple[float, ...] = ()
    nll: tuple[float, ...] = ()


def fit_calibration(
    clients: CalibrationClients, settings: CalibrationSettings, facts: CalibrationFacts
) -> Calibration:
    """The calibration of an ensemble by the calibration rows of clients.

    Args:
        clients: that are asked.
        settings: what is calibrated, and how.
        facts: about the ensemble and the clients.
    """
    settings = settings.for_task(facts.task, facts.outputs)
    if settings.method != "none" and not facts.one_label:
        raise InputError(
            "calibrate() needs one label per row for prediction sets, and these rows have one per "
            "position of a sequence. Use method='none', which calibrates the temperature."
        )
    if not clients.rows:
        raise InputError(
            "calibrate() needs calibration rows, and no client has one: set data.calibration to "
            "the share of rows that clients hold back, such as 0.1."
        )
    scaling = _Scaling()
    split = settings.temperature != "none" and settings.sets_thresholds
    if settings.temperature != "none":
        scaling = _fit_temperatures(clients, settings, split)
    query: dict[str, Any] = {
        "split": split,
        "place": scaling.place or "none",
        "temperatures": list(scaling.temperatures),
        "method": settings.method,
        "randomized": settings.randomized,
        "penalty": settings.penalty,
        "free_classes": settings.free_classes,
        "by_class": settings.scope == "class",
    }
    limits = _Limits((), {})
    if settings.method != "none":
        limits = _find_thresholds(clients, query, settings, facts)
    own: tuple[float, ...] = ()
    if limits.of_client:
        own = tuple(limits.of_client.get(i, limits.common[0]) for i in range(facts.clients))
    names = facts.client_names
    return Calibration(
        settings=settings,
        outputs=facts.outputs,
        modes=facts.modes,
        rows=sum(clients.rows.values()),
        clients=len(clients.rows),
        **scaling._asdict(),
        thresholds=limits.common,
        client_thresholds=own,
        client_names=tuple(names) if own and names is not None else None,
        abstention={
            score: _count_uncertainty(clients, query, score, facts.outputs)
            for score in settings.abstain
        },
    )


def _fit_temperatures(
    clients: CalibrationClients, settings: CalibrationSettings, split: bool
) -> _Scaling:
    """The temperatures of the mean or of the members, whichever has the lower NLL on all rows.

    They are 1 if there are too few rows to say that others are better.
    """
    place = settings.temperature
    query = {"split": split, "member": place != "mean"}
    answers = clients.ask({**query, "kind": "temperature"}).values()
    rows = sum(int(answer["count"]) for answer in answers)
    if rows == 0:
        raise InputError(
            "calibrate() needs more calibration rows: none of these few fits the temperature. "
            "Hold back more (data.calibration), or use temperature='none'."
        )
    temperature, nll = fit_temperature(_total(answers, "mean"))
    found = _Scaling("mean", (temperature,))
    if place != "mean":
        temperatures = tuple(fit_temperature(sums)[0] for sums in _total(answers, "member"))
        of_members = _Scaling("member", temperatures)
        if place == "member" or _ask_nll(clients, split, of_members)[2] < nll:
            found = of_members
    before, wrong_before, after, wrong_after = _ask_nll(clients, split, found)
    # Too few rows without an error say that the model is never wrong, and the temperature that fits
    # them best is the smallest: the first error in new rows then costs more than all that was
    # gained. As in Laplace's rule of succession, one more row is therefore assumed, an average one
    # whose label is the likeliest of its wrong classes. A temperature that does not pay for it is
    # not used. (A cross-validation would not notice: its folds have no error, either.)
    if before - after <= (wrong_after - wrong_before) / rows:
        found, after = found._replace(temperatures=(1.0,) * len(found.temperatures)), before
    return found._replace(nll=(before / rows, after / rows))


def _ask_nll(clients: CalibrationClients, split: bool, scaling: _Scaling) -> list[float]:
    """Total NLL, and that of the likeliest wrong classes: both before scaling, then both after."""
    temperatures = list(scaling.temperatures)
    query = {"kind": "nll", "split": split, "place": scaling.place, "temperatures": temperatures}
    nll: list[float] = _total(clients.ask(query).values(), "nll").tolist()
    return nll


class _Limits(NamedTuple):
    """The common thresholds, one or one per class, and those of clients by their index."""

    common: tuple[float, ...]
    of_client: dict[int, float]


def _find_thresholds(
    clients: CalibrationClients,
    query: Mapping[str, Any],
    settings: CalibrationSettings,
    facts: CalibrationFacts,
) -> _Limits:
    """The thresholds of sets or intervals, by histograms that are refined where it is needed."""
    by_class, bounded = settings.scope == "class", settings.method in CLASS_METHODS
    groups = facts.outputs if by_class else 1
    if bounded:
        top = largest_class_score(
            settings.method,  # type: ignore[arg-type]
            facts.outputs,
            penalty=settings.penalty,
            free_classes=settings.free_classes,
        )
        bottom = 0.0
    else:
        reaches = clients.ask({**query, "kind": "range"}).values()
        top = max(float(answer["reach"]) for answer in reaches)
        bottom = -top if settings.method == "cqr" else 0.0
    lower = torch.full((groups,), bottom, dtype=torch.double)
    upper = torch.full((groups,), top, dtype=torch.double)
    bins = BINS // groups
    first: dict[str, Any] = {}
    rank = torch.empty(0)
    while True:
        request = {"lower": lower.tolist(), "upper": upper.tolist(), "bins": bins}
        answers = clients.ask({**query, "kind": "histogram", **request})
        counts = _total(answers.values(), "counts")
        if not first:
            first = {**request, "pool": counts[0].tolist()}
            with_rows = sum(bool(answer["counts"].any()) for answer in answers.values())
            rank = _ranks(
                counts.sum(1), with_rows, sum(clients.rows.values()), settings, facts.class_names
            )
        edges = bin_edges(lower, upper, bins)
        index = find_bins(counts, rank).unsqueeze(1)
        below = torch.cat([lower.unsqueeze(1), edges], 1).gather(1, index).squeeze(1)
        threshold = edges.gather(1, index).squeeze(1)
        scale = torch.full_like(threshold, top) if bounded else threshold.abs()
        # Below this width, edges are equal in floating point.
        smallest = max(abs(top), abs(bottom)) * 1e-9
        # The tolerance is for the rounding of edges.
        if bool((threshold - below <= (_PRECISION * scale).clamp(min=smallest) * (1 + 1e-6)).all()):
            break
        lower, upper = below, threshold
    own: dict[int, float] = {}
    if settings.scope == "client":
        answers = clients.ask(
            {
                **query,
                "kind": "threshold",
                **first,
                "alpha": settings.alpha,
                "pool_weight": rows_needed(settings.alpha),
            }
        )
        own = {client: float(answer["threshold"]) for client, answer in answers.items()}
    return _Limits(tuple(threshold.tolist()), own)


def _ranks(
    rows: Tensor,
    clients: int,
    total: int,
    settings: CalibrationSettings,
    names: Sequence[str] | None,
) -> Tensor:
    """The rank of each group's threshold, [G]; raises if a group has too few rows.

    Args:
        rows: number of rows of each group that set thresholds, [G].
        clients: number of clients that have some.
        total: number of calibration rows, with those that fit the temperature.
        settings: with alpha and the scope.
        names: of the classes.
    """
    alpha, pool = settings.alpha, settings.scope == "pool"
    needed = rows_needed(alpha, clients if pool else 1)
    short = torch.nonzero(rows < needed).flatten().tolist()
    if short and settings.scope == "class":
        name = short[0] if names is None else names[short[0]]
        count = int(rows[short[0]])
        has = "never occurs" if count == 0 else f"occurs {count} times"
        raise InputError(
            f"calibrate() needs {needed} calibration rows of each class for scope='class' and "
            f"alpha={alpha:g}, and class {name} {has}: {_MORE_ROWS}, or use another scope."
        )
    if short:
        count = int(rows[0])
        others = f"; the other {total - count} of the {total} rows fit the temperature"
        ways = [
            "hold back more rows (data.calibration)",
            "choose a larger alpha",
            *(
                ["use temperature='none', so that all rows set the threshold"]
                if total > count
                else []
            ),
            *(["use scope='mixture', which needs fewer"] if pool else []),
        ]
        raise InputError(
            f"calibrate() needs {needed} calibration rows for the threshold of "
            f"scope='{settings.scope}' and alpha={alpha:g}, and there are {count}, of {clients} "
            f"clients{others if total > count else ''}. You can {', '.join(ways[:-1])}, or "
            f"{ways[-1]}."
        )
    count = clients if pool else 1
    return torch.tensor([conformal_rank(int(n), alpha, count) for n in rows.tolist()])


def _count_uncertainty(
    clients: CalibrationClients, query: Mapping[str, Any], score: str, classes: int
) -> list[list[int]]:
    """Number of right and of wrong answers in bins of a score of uncertainty, [2, bins]."""
    bins = {"lower": [0.0], "upper": [score_range(score, classes)], "bins": _UNCERTAINTY_BINS}
    answers = clients.ask({**query, **bins, "kind": "uncertainty", "score": score})
    counts: list[list[int]] = _total(answers.values(), "counts").tolist()
    return counts


def _total(answers: Any, name: str) -> Tensor:
    """The sum of a tensor over all answers; integers are added as int64."""
    values = torch.stack([answer[name] for answer in answers])
    total: Tensor = values.double().sum(0) if values.is_floating_point() else values.long().sum(0)
    return total
