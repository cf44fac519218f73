"""Learning curves over seeds, as the report page and the PNGs draw them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..experiment.studies.compare import mean_and_std
from .tables.result_table import scaled
from .time_to_accuracy import Records


def rounds_with_tests(runs: Sequence[Records]) -> list[int]:
    """The rounds in which at least one of the runs was tested."""
    return sorted({record["round"] for records in runs for record in records if "test" in record})


def curve_over_seeds(
    runs: Sequence[Records], metric: str, groups: Sequence[Sequence[int]]
) -> tuple[list[float], list[float]]:
    """Mean and standard deviation over seeds, one pair per group of rounds.

    Each seed counts with the mean of its tests in the group. Where no seed has a test, the mean is
    NaN.
    """
    by_run = [
        {
            r["round"]: scaled(metric, r["test"][metric])
            for r in records
            if metric in r.get("test", {})
        }
        for records in runs
    ]
    pairs = []
    for rounds in groups:
        tests = [[found[number] for number in rounds if number in found] for found in by_run]
        means = [sum(values) / len(values) for values in tests if values]
        pairs.append(mean_and_std(means) if means else (math.nan, 0.0))
    return [mean for mean, _ in pairs], [spread for _, spread in pairs]


def visible_range(series: Sequence[Sequence[float]]) -> tuple[list[float], bool]:
    """The values that a y-axis must cover, and whether they are all values.

    They are all finite values, unless the first quarter of the rounds would take up most of the
    axis. Then they are the range of the later rounds with a margin, because the differences that
    readers look for are those at the end.
    """
    finite = [v for values in series for v in values if math.isfinite(v)]
    later = [v for values in series for v in values[len(values) // 4 :] if math.isfinite(v)]
    if not later or max(finite) - min(finite) <= 2.5 * (max(later) - min(later)):
        return finite, True
    margin = 0.25 * (max(later) - min(later))
    return [max(min(later) - margin, min(finite)), min(max(later) + margin, max(finite))], False
