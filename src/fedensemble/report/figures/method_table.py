"""A table of methods: one line per method, one column per metric, and differences to a baseline.

Differences are paired: both methods have the same data, clients and random numbers per seed. Their
95 % confidence intervals are those of Student's t over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

import matplotlib as mpl
from matplotlib.figure import Figure
from scipy import stats

from ...errors import InputError
from ...experiment.studies.compare import mean_and_std
from ...experiment.studies.paper_table import Reproduction
from ...experiment.studies.reproduce import CellResult
from ..palette import LIGHT as COLORS
from ..tables.best import HIGHER_IS_BETTER, best_places
from ..tables.result_table import NONE, TITLES, UPLOADED, TextTable, in_megabytes, scaled, show
from .paper_grid import PaperReport, headline, over_seeds
from .plots import LINES, STYLE, escape_label, one_legend

MINUTES, SEEDS = "minutes", "seeds"
CONFIDENCE = 0.95
HEADER = ("row", "method", "metric", "mean", "standard deviation", "difference", "95 % CI", "seeds")


def methods(reproduction: Reproduction, results: Sequence[CellResult]) -> PaperReport:
    """The table of methods, its unrounded values, its figure and a sentence per row.

    The option `baseline` of the table names the method that the others are compared with.
    """
    table = reproduction.table
    metrics, baseline = table.shown or [table.metric], str(table.options.get("baseline", ""))
    labels = {result.cell.column for result in results}
    if baseline not in labels:
        raise InputError(
            f"{reproduction.name}: options.baseline must be the label of a column; "
            f"got {baseline!r}."
        )
    known = [result for result in results if result.runs is not None]
    lines: list[tuple[str, ...]] = []
    numbers: list[tuple[str, ...]] = []
    best: set[tuple[int, int]] = set()
    notes: list[str] = []
    for row in dict.fromkeys(result.cell.row for result in known):
        own = {result.cell.column: result for result in known if result.cell.row == row}
        first = len(lines)
        lines += [_line(row, result, own.get(baseline), metrics) for result in own.values()]
        for place, metric in enumerate(metrics):
            cells = [line[2 + place] for line in lines[first:]]
            best |= {(first + index, 2 + place) for index in best_places(metric, cells)}
        numbers += [
            _numbers(row, result, own.get(baseline), metric)
            for result in own.values()
            for metric in metrics
        ]
        notes += _ahead(row, own, baseline, metrics[:2])
    titles = [TITLES.get(metric, metric) for metric in metrics]
    header = (
        "",
        "method",
        *titles,
        *(f"{title}, minus {baseline}" for title in titles[:2]),
        UPLOADED,
        MINUTES,
        SEEDS,
    )
    shown = TextTable(headline(reproduction), header, tuple(lines))
    figures = {}
    if known:
        figures["table.png"] = _figure(reproduction, known, metrics[:2], baseline)
    if curves := gain_curves(known, baseline, metrics[1]) if len(metrics) > 1 else {}:
        figures["gain.png"] = _gain_figure(reproduction, curves, baseline, metrics[1])
    return PaperReport(shown, TextTable("numbers", HEADER, tuple(numbers)), figures, notes, best)


def difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> tuple[float, float]:
    """The mean paired difference over common seeds, and half the width of its 95 % interval.

    The half-width is NaN for a single common seed, and both are NaN without one.

    >>> mean, half = difference({0: 1.0, 1: 2.0, 2: 4.0}, {0: 0.0, 1: 1.0, 2: 2.0})
    >>> round(mean, 3), round(half, 3)
    (1.333, 1.434)
    """
    gaps = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    if not gaps:
        return math.nan, math.nan
    mean, deviation = mean_and_std(gaps)
    if len(gaps) == 1:
        return mean, math.nan
    quantile = float(stats.t.ppf(0.5 + CONFIDENCE / 2, len(gaps) - 1))
    return mean, quantile * deviation / math.sqrt(len(gaps))


def values_by_seed(result: CellResult, metric: str) -> dict[int, float]:
    """A metric under the evaluation of the cell's column, by seed."""
    values = over_seeds(result.runs, metric, result.cell.way)
    seeds = [config.seed for config in result.cell.configs]
    return dict(zip(seeds, values, strict=True)) if values else {}


def _line(
    row: str, result: CellResult, baseline: CellResult | None, metrics: Sequence[str]
) -> tuple[str, ...]:
    """One line of the table to read."""
    assert result.runs is not None
    cells = []
    for metric in metrics:
        values = list(values_by_seed(result, metric).values())
        spread = mean_and_std(values)[1] if len(values) > 1 else None
        cells.append(show(metric, mean_and_std(values)[0], spread) if values else NONE)
    gaps = [_gap(result, baseline, metric) for metric in metrics[:2]]
    uploaded = mean_and_std([summary["bytes_up"] for summary in result.runs.summaries])[0]
    seconds = mean_and_std([summary["seconds"] for summary in result.runs.summaries])[0]
    traffic = (in_megabytes(uploaded), f"{seconds / 60:.2g}", str(len(result.runs.summaries)))
    return (row, result.cell.column, *cells, *gaps, *traffic)


def _gap(result: CellResult, baseline: CellResult | None, metric: str) -> str:
    """The difference to the baseline with its interval, as text."""
    if baseline is None or baseline.cell.column == result.cell.column:
        return NONE
    mean, half = difference(values_by_seed(result, metric), values_by_seed(baseline, metric))
    if math.isnan(mean):
        return NONE
    text = show(metric, mean) if math.isnan(half) else show(metric, mean, half)
    return text if text.startswith("-") else f"+{text}"


def _numbers(
    row: str, result: CellResult, baseline: CellResult | None, metric: str
) -> tuple[str, ...]:
    """One line of the table for programs."""
    ours = values_by_seed(result, metric)
    mean, spread = mean_and_std(list(ours.values())) if ours else (math.nan, math.nan)
    gap = (
        (math.nan, math.nan)
        if baseline is None
        else difference(ours, values_by_seed(baseline, metric))
    )
    texts = ["" if math.isnan(value) else f"{value:.6g}" for value in (mean, spread, *gap)]
    return (row, result.cell.column, metric, *texts, str(len(ours)))


def _ahead(
    row: str, own: Mapping[str, CellResult], baseline: str, metrics: Sequence[str]
) -> list[str]:
    """A sentence on which methods are better than the baseline in all of the metrics."""
    if baseline not in own or len(own) < 2:
        return []
    better = [
        name
        for name, result in own.items()
        if name != baseline and all(_is_better(result, own[baseline], m) for m in metrics)
    ]
    what = " and ".join(TITLES.get(metric, metric).removesuffix(" %") for metric in metrics)
    names = "; ".join(better) if better else "none"  # names contain commas
    return [f"{row}: better than {baseline} in both {what}, by the means: {names}."]


def _is_better(result: CellResult, baseline: CellResult, metric: str) -> bool:
    gap = difference(values_by_seed(result, metric), values_by_seed(baseline, metric))[0]
    return gap > 0 if HIGHER_IS_BETTER.get(metric, True) else gap < 0


def gain_curves(
    known: Sequence[CellResult], baseline: str, metric: str
) -> dict[str, dict[str, tuple[list[float], list[float]]]]:
    """By row and method with several modes: visits per mode, and the gain over the baseline.

    The gain at a test is the difference of the means over seeds to the baseline at the same round,
    positive if the method is better.
    """
    curves: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    sign = 1 if HIGHER_IS_BETTER.get(metric, True) else -1
    base = {result.cell.row: result for result in known if result.cell.column == baseline}
    for result in known:
        if result.cell.row not in base or result.runs is None:
            continue
        ensemble = result.cell.configs[0].ensemble
        if ensemble.modes == 1 or result.cell.way != "test":
            continue
        own, theirs = _mean_tests(result, metric), _mean_tests(base[result.cell.row], metric)
        rounds = [round for round in own if round in theirs]
        visits = [round * ensemble.clients_per_round / ensemble.modes for round in rounds]
        gains = [sign * (own[round] - theirs[round]) for round in rounds]
        curves.setdefault(result.cell.row, {})[result.cell.column] = (visits, gains)
    return curves


def _mean_tests(result: CellResult, metric: str) -> dict[int, float]:
    """A metric by round, mean over seeds."""
    assert result.runs is not None
    way, found = result.cell.way, list[dict[int, float]]()
    for records in result.runs.curves:
        tests = [record for record in records if metric in record.get(way, {})]
        found.append({record["round"]: record[way][metric] for record in tests})
    return {round: mean_and_std([each[round] for each in found])[0] for round in found[0]}


def _gain_figure(
    reproduction: Reproduction,
    curves: Mapping[str, Mapping[str, tuple[list[float], list[float]]]],
    baseline: str,
    metric: str,
) -> Figure:
    """One panel per row: the gain over the baseline against the visits per mode."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 4.4 * len(curves)), layout="constrained")
        axes = figure.subplots(len(curves), 1, squeeze=False).flatten()
        title = TITLES.get(metric, metric)
        for axis, (row, methods_of_row) in zip(axes, curves.items(), strict=True):
            for index, (name, (visits, gains)) in enumerate(methods_of_row.items()):
                axis.plot(
                    visits,
                    [scaled(metric, gain) for gain in gains],
                    color=COLORS[index % len(COLORS)],
                    linestyle=LINES[index // len(COLORS) % len(LINES)],
                    marker="o",
                    markersize=3,
                    label=escape_label(name),
                )
            axis.axhline(0, color="black", linewidth=0.8, linestyle="--")
            # The first tests, when nothing has learned yet, would squeeze all others.
            later = [g for _, gains in methods_of_row.values() for g in gains[len(gains) // 2 :]]
            axis.set_ylim(*_gain_limits([scaled(metric, gain) for gain in later]))
            axis.set(
                title=escape_label(row),
                xlabel="visits per mode",
                ylabel=f"gain in {title} over {escape_label(baseline)}",
            )
        one_legend(figure, axes)
        figure.suptitle(escape_label(headline(reproduction)))
        return figure


def _gain_limits(gains: Sequence[float]) -> tuple[float, float]:
    """Limits of the axis of gains: methods near the baseline stay apart from each other.

    A method that fails is so far behind that the others would lie on one line. Gains beyond six
    times the median of all absolute gains do not count; their curves leave the figure.
    """
    near = 6 * median(abs(gain) for gain in gains)
    shown = [gain for gain in gains if abs(gain) <= near] + [0.0]
    low, high = min(shown), max(shown)
    margin = 0.1 * (high - low or 1)
    return low - margin, high + margin


def _figure(
    reproduction: Reproduction, known: Sequence[CellResult], metrics: Sequence[str], baseline: str
) -> Figure:
    """One panel per row and metric: a dot per method, with a line at the baseline."""
    rows = list(dict.fromkeys(result.cell.row for result in known))
    columns = list(dict.fromkeys(result.cell.column for result in known))
    with mpl.rc_context(STYLE):
        size = (5.6 * len(metrics), (0.27 * len(columns) + 1.0) * len(rows))
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(len(rows), len(metrics), squeeze=False, sharey=True)
        for axes, row in zip(grid, rows, strict=True):
            for axis, metric in zip(axes, metrics, strict=True):
                for result in known:
                    values = list(values_by_seed(result, metric).values())
                    if result.cell.row != row or not values:
                        continue
                    place = columns.index(result.cell.column)
                    mean, spread = (scaled(metric, value) for value in mean_and_std(values))
                    axis.errorbar(
                        mean, place, xerr=spread or None, fmt="o", capsize=3, color=COLORS[0]
                    )
                    if result.cell.column == baseline:
                        axis.axvline(mean, color="black", linewidth=0.8, linestyle="--")
                axis.set_yticks(range(len(columns)), list(map(escape_label, columns)))
                axis.set(title=escape_label(row), xlabel=TITLES.get(metric, metric))
            axes[0].invert_yaxis()
        figure.suptitle(escape_label(headline(reproduction)))
        return figure
