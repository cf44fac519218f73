"""Advises on the number of modes, from a short pilot on validation data.

A mode of an ensemble has a K-th of FedAvg's visits, so the ensemble is behind at first. What the
modes lack shrinks as training goes on, and what averaging K models gains stays. The difference of
the ensemble's metric to FedAvg's after r rounds is modelled as

    gain(r) = a + b / r,

fitted to the tests of the pilot by least squares and read off at the last round of the config. Both
sides predict with the same average of their modes, so that the gain is that of K modes alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...config.schema import Config
from ...config.toml import merge
from ...errors import InputError
from .compare import Comparison, RowResult, make_comparison

CANDIDATES = (3, 5, 10)
AVERAGE = "ema"
VALIDATION = 0.1  # share of the training data that the pilot is tested on
TESTS = 10  # during the pilot
SHORTEST = 20  # rounds of a pilot by default, at least
LOWER_IS_BETTER = ("nll", "mse")


@dataclass(frozen=True)
class Candidate:
    """What the pilot says about one number of modes.

    Args:
        modes: K.
        visits: visits per mode in the whole training.
        clients: clients per mode and round.
        value: the metric at the end of the pilot, mean over seeds.
        gain: improvement over FedAvg at the end of the pilot, mean over seeds; 0 for K = 1.
        expected: improvement over FedAvg that is expected at the end of training.
        error: standard error of `expected` over seeds; NaN for a single seed.
    """

    modes: int
    visits: float
    clients: float
    value: float
    gain: float = 0.0
    expected: float = 0.0
    error: float = 0.0


@dataclass(frozen=True)
class Advice:
    """The recommended settings and what they are based on.

    Args:
        modes: the recommended K.
        average: the recommended average, "ema" or "none".
        candidates: by K in ascending order; the first is FedAvg.
        average_gain: improvement of the recommended K's predictions by the average in the pilot.
        metric: NLL, or for regression the mean squared error. Lower is better.
    """

    modes: int
    average: str
    candidates: tuple[Candidate, ...]
    average_gain: float
    metric: str


def pilot_rounds(config: Config, rounds: int | None) -> int:
    """Returns the length of the pilot: `rounds`, or a tenth of the config's, at least 20."""
    chosen = min(config.rounds, max(SHORTEST, config.rounds // 10)) if rounds is None else rounds
    if not 2 <= chosen <= config.rounds:
        raise InputError(
            f"The pilot must have 2 to {config.rounds} rounds, the rounds of the config; "
            f"got {chosen}."
        )
    return chosen


def plan_pilot(
    config: Config, rounds: int, modes: Sequence[int] = CANDIDATES, seeds: Sequence[int] = (0, 1)
) -> Comparison:
    """Returns the runs of the pilot: FedAvg (K = 1) and one row per number of modes.

    They are tested on a part of the training data, because a choice must not see the test set.
    """
    values = config.values()
    fixed: dict[str, Any] = {
        "name": f"{config.name}-pilot",
        "rounds": rounds,
        "evaluation": {"every": max(1, rounds // TESTS), "dropout": False},
        "average": {"name": AVERAGE},
    }
    if values["data"].get("validation") is None:
        fixed["data"] = {"validation": VALIDATION}
    # The table of another average would leave options behind that "ema" does not have.
    base = merge({key: value for key, value in values.items() if key != "average"}, fixed)
    per_round = values["ensemble"]["clients_per_round"]
    if not all(k > 1 for k in modes):
        raise InputError(
            f"--modes takes numbers of modes of 2 and more, because FedAvg (one mode) is always "
            f"tried; got {', '.join(map(str, modes))}."
        )
    candidates = sorted({k for k in modes if k <= per_round})
    if not candidates:
        raise InputError(
            f"Each mode needs a client per round: none of {', '.join(map(str, modes))} modes can "
            f"be trained with ensemble.clients_per_round = {per_round}. Raise it, or give smaller "
            "numbers with --modes."
        )
    single = {"ensemble": {"modes": 1, "strata": 1, "schedule": "balanced"}}
    several = {"strata": values["ensemble"].get("strata"), "schedule": "balanced"}
    rows = [("FedAvg", single)] + [
        (f"K = {k}", {"ensemble": {**several, "modes": k}}) for k in candidates
    ]
    metric = "mse" if config.training.loss == "mse" else "nll"
    return make_comparison(str(fixed["name"]), base, rows, seeds, metric)


def expected_gain(rounds: Sequence[int], gains: Sequence[float], last: int) -> float:
    """Returns a + b / last for the least-squares fit of gain(r) = a + b / r to the pilot's tests.

    The first tests are left out if there are enough: b / r does not describe the first rounds, in
    which models leave their random start.

    >>> rounds = [10, 20, 40, 80]
    >>> round(expected_gain(rounds, [0.1 - 4 / r for r in rounds], 400), 6)
    0.09
    """
    x, y = np.asarray(rounds, float), np.asarray(gains, float)
    if len(x) >= 2 * 3:
        x, y = x[len(x) // 2 :], y[len(y) // 2 :]
    if len(x) < 2:
        return float(y[-1])
    coefficient, offset = np.polyfit(1 / x, y, 1)
    return float(offset + coefficient / last)


def make_advice(config: Config, results: Sequence[RowResult]) -> Advice:
    """Returns the advice from the finished runs of `plan_pilot`, FedAvg first."""
    metric = "mse" if config.training.loss == "mse" else "nll"
    failed = [result.label for result in results if result.failed]
    if failed:
        raise InputError(
            f"The pilot diverged for {', '.join(failed)}: lower algorithm.lr and try again."
        )
    single = results[0]
    candidates = [_candidate(config, 1, single, single, metric)]
    candidates += [
        _candidate(config, int(result.summaries[0]["modes"]), result, single, metric)
        for result in results[1:]
    ]
    best = max(candidates, key=lambda candidate: candidate.expected)
    # A gain within its own uncertainty is no reason to predict with K models.
    if not best.expected > (0.0 if math.isnan(best.error) else best.error):
        best = candidates[0]
    chosen = results[candidates.index(best)]
    average_gain = float(
        np.mean(
            [summary["test_last"][metric] - summary["test"][metric] for summary in chosen.summaries]
        )
    )
    average = AVERAGE if average_gain > 0 else "none"
    return Advice(best.modes, average, tuple(candidates), average_gain, metric)


def _candidate(
    config: Config, modes: int, result: RowResult, single: RowResult, metric: str
) -> Candidate:
    per_round = config.ensemble.clients_per_round
    values = [_tests(records, metric) for records in result.curves]
    baselines = [_tests(records, metric) for records in single.curves]
    visits = config.rounds * per_round / modes
    value = float(np.mean([list(own.values())[-1] for own in values]))
    if modes == 1:
        return Candidate(1, visits, float(per_round), value)
    # Lower is better for both metrics, so that the gain is FedAvg's value minus the ensemble's.
    gains = [
        {round: base[round] - own[round] for round in own}
        for own, base in zip(values, baselines, strict=True)
    ]
    expected = [expected_gain(list(gain), list(gain.values()), config.rounds) for gain in gains]
    error = np.std(expected, ddof=1) / math.sqrt(len(expected)) if len(expected) > 1 else math.nan
    last = float(np.mean([list(gain.values())[-1] for gain in gains]))
    clients = per_round / modes
    return Candidate(modes, visits, clients, value, last, float(np.mean(expected)), float(error))


def _tests(records: Sequence[Mapping[str, Any]], metric: str) -> dict[int, float]:
    """Returns the metric by round."""
    return {record["round"]: record["test"][metric] for record in records if "test" in record}
