"""A table of personal methods: how the metrics of clients are distributed, and the bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import matplotlib as mpl
from matplotlib.figure import Figure
from scipy import stats

from ...experiment.studies.compare import mean_and_std
from ...experiment.studies.paper_table import Reproduction
from ...experiment.studies.reproduce import CellResult
from ..palette import LIGHT as COLORS
from ..tables.best import best_places
from ..tables.result_table import (
    DOWNLOADED,
    NONE,
    TITLES,
    UPLOADED,
    TextTable,
    in_megabytes,
    scaled,
    show,
)
from .method_table import CONFIDENCE, MINUTES, SEEDS, difference, values_by_seed
from .paper_grid import PaperReport, headline, over_seeds
from .plots import STYLE, escape_label

# The metric, its statistic over clients, whether of new clients, and the rest of the title.
COLUMNS = (
    ("accuracy", "mean", False, ""),
    ("accuracy", "p10", False, "10th percentile"),
    ("accuracy", "worst_10", False, "worst tenth"),
    ("accuracy", "mean", True, "new clients"),
    ("nll", "mean", False, ""),
    ("nll", "worst_10", False, "worst tenth"),
    ("nll", "mean", True, "new clients"),
    ("ece", "mean", False, ""),
)
HEADER = ("row", "method", "metric", "mean", "standard deviation", "seeds")
RECOVERED = "groups found %"
RECOVERED_LEAST = f"{RECOVERED}, worst seed"
ENOUGH = 0.95  # share of clients that a method must find for each seed


def client_methods(reproduction: Reproduction, results: Sequence[CellResult]) -> PaperReport:
    """The table, its unrounded values, a figure of accuracy with bytes, and sentences.

    A column's `way` is the key of the summary that has its metrics. Those of new clients are under
    the key that the option `new` of the table gives for a column, by default that of `way` with
    "_new" added. The options `compare` and `with` name two columns that a sentence compares.
    """
    known = [result for result in results if result.runs is not None]
    new = {str(k): str(v) for k, v in dict(reproduction.table.options.get("new", {})).items()}
    lines: list[tuple[str, ...]] = []
    numbers: list[tuple[str, ...]] = []
    best: set[tuple[int, int]] = set()
    notes: list[str] = []
    found_groups = any(over_seeds(r.runs, "recovered", r.cell.way) for r in known)
    for row in dict.fromkeys(result.cell.row for result in known):
        own = [result for result in known if result.cell.row == row]
        first = len(lines)
        for result in own:
            lines.append(_line(row, result, new, groups=found_groups))
            numbers += _numbers(row, result, new)
        for place, (metric, _, _, _) in enumerate(COLUMNS):
            cells = [line[2 + place] for line in lines[first:]]
            best |= {(first + index, 2 + place) for index in best_places(metric, cells)}
        notes += _comparison(row, own, reproduction.table.options, new)
        notes += _found_groups(row, own)
    titles = [TITLES[metric] + (f", {rest}" if rest else "") for metric, _, _, rest in COLUMNS]
    groups = (RECOVERED, RECOVERED_LEAST) if found_groups else ()
    header = ("", "method", *titles, *groups, UPLOADED, DOWNLOADED, MINUTES, SEEDS)
    figures = {"table.png": _figure(reproduction, known, new)} if known else {}
    return PaperReport(
        TextTable(headline(reproduction), header, tuple(lines)),
        TextTable("numbers", HEADER, tuple(numbers)),
        figures,
        notes,
        best,
    )


def _values(
    result: CellResult, metric: str, statistic: str, new: Mapping[str, str], *, of_new: bool
) -> list[float]:
    """A statistic over clients, one value per seed."""
    way = result.cell.way
    if of_new:
        default = {"test_clients": "test_new_clients"}.get(way, f"{way}_new")
        way = new.get(result.cell.column, default)
    return list(over_seeds(result.runs, f"{metric}_{statistic}", way))


def _line(row: str, result: CellResult, new: Mapping[str, str], *, groups: bool) -> tuple[str, ...]:
    assert result.runs is not None
    cells = []
    for metric, statistic, of_new, _ in COLUMNS:
        values = _values(result, metric, statistic, new, of_new=of_new)
        spread = mean_and_std(values)[1] if len(values) > 1 else None
        cells.append(show(metric, mean_and_std(values)[0], spread) if values else NONE)
    if groups:
        shares = over_seeds(result.runs, "recovered", result.cell.way)
        found = (mean_and_std(list(shares))[0], min(shares)) if shares else ()
        cells += [f"{100 * share:.1f}" for share in found] or [NONE, NONE]
    up, down = total_bytes(result)
    minutes = mean_and_std([summary["seconds"] for summary in result.runs.summaries])[0] / 60
    traffic = (in_megabytes(up), in_megabytes(down), f"{minutes:.2g}")
    return (row, result.cell.column, *cells, *traffic, str(len(result.runs.summaries)))


def total_bytes(result: CellResult) -> tuple[float, float]:
    """Bytes up and down over all clients, training and personalization; mean over seeds."""
    assert result.runs is not None
    summaries, way = result.runs.summaries, result.cell.way
    up = mean_and_std([summary["bytes_up"] for summary in summaries])[0]
    down = mean_and_std([s["bytes_down"] + s.get(way, {}).get("bytes_down", 0) for s in summaries])[
        0
    ]
    return up, down


def _numbers(row: str, result: CellResult, new: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Lines of the table for programs."""
    lines = []
    for metric, statistic, of_new, _ in COLUMNS:
        values = _values(result, metric, statistic, new, of_new=of_new)
        mean, spread = mean_and_std(values) if values else (math.nan, math.nan)
        texts = ["" if math.isnan(value) else f"{value:.6g}" for value in (mean, spread)]
        name = f"{metric}_{statistic}{'_new' if of_new else ''}"
        lines.append((row, result.cell.column, name, *texts, str(len(values))))
    shares = list(over_seeds(result.runs, "recovered", result.cell.way))
    if shares:
        texts = [f"{value:.6g}" for value in mean_and_std(shares)]
        lines.append((row, result.cell.column, "recovered", *texts, str(len(shares))))
        lines.append((row, result.cell.column, "recovered_least", f"{min(shares):.6g}", "", ""))
    for name, value in zip(("bytes_up", "bytes_down"), total_bytes(result), strict=True):
        lines.append((row, result.cell.column, name, f"{value:.6g}", "", ""))
    return lines


def _comparison(
    row: str, own: Sequence[CellResult], options: Mapping[str, object], new: Mapping[str, str]
) -> list[str]:
    """How far the column `compare` is ahead of `with`, its interval, and their bytes."""
    by_column = {result.cell.column: result for result in own}
    ours, theirs = (by_column.get(str(options.get(name, ""))) for name in ("compare", "with"))
    if ours is None or theirs is None:
        return []
    (mine, other), bytes_of = (
        (_values(each, "accuracy", "mean", new, of_new=False) for each in (ours, theirs)),
        [sum(total_bytes(each)) for each in (ours, theirs)],
    )
    if not mine or not other or not bytes_of[1]:
        return []
    gap = 100 * (mean_and_std(mine)[0] - mean_and_std(other)[0])
    return [
        f"{row}: {ours.cell.column} is {abs(gap):.2f} points of accuracy "
        f"{'ahead of' if gap >= 0 else 'behind'} {theirs.cell.column}{_interval(ours, theirs)}, "
        f"with {in_megabytes(bytes_of[0])} MB against {in_megabytes(bytes_of[1])} MB, "
        f"{bytes_of[0] / bytes_of[1]:.2f} of its bytes."
    ]


def _interval(ours: CellResult, theirs: CellResult) -> str:
    """The 95 % interval of the difference in accuracy, in words; empty if it is not known.

    With several seeds, that of the mean of the differences by seed (Student's t). With one seed,
    that of the clients of this run, as if those of the two runs were independent: the same clients
    are in both, so that it is rather too wide.
    """
    gap, half = difference(*(values_by_seed(each, "accuracy_mean") for each in (ours, theirs)))
    if math.isnan(gap):
        return ""
    of = f"over {len(values_by_seed(ours, 'accuracy_mean'))} seeds"
    if math.isnan(half):
        spreads, counts = (
            [next(iter(over_seeds(each.runs, name, each.cell.way)), math.nan) for each in both]
            for name, both in (("accuracy_std", (ours, theirs)), ("clients", (ours, theirs)))
        )
        variance = sum(s**2 / max(n - 1, 1) for s, n in zip(spreads, counts, strict=True))
        half = float(stats.norm.ppf(0.5 + CONFIDENCE / 2)) * math.sqrt(variance)
        of = f"over {counts[0]:g} clients of one seed"
    if math.isnan(half):
        return ""
    low, high = (scaled("accuracy", gap + sign * half) for sign in (-1, 1))
    return f" ({100 * CONFIDENCE:.0f} % CI of the difference {low:+.2f} to {high:+.2f}, {of})"


def _found_groups(row: str, own: Sequence[CellResult]) -> list[str]:
    """Which methods find the groups of enough clients for every seed, if groups are known."""
    shares = {r.cell.column: over_seeds(r.runs, "recovered", r.cell.way) for r in own}
    known = {column: found for column, found in shares.items() if found}
    if not known:
        return []
    good = [
        f"{column} (at least {100 * min(found):.1f} %)"
        for column, found in known.items()
        if min(found) >= ENOUGH
    ]
    seeds = max(len(found) for found in known.values())
    each = f"for each of {seeds} seeds" if seeds > 1 else "for the one seed"
    what = f"The group of at least {100 * ENOUGH:.0f} % of the clients is found {each} by"
    return [f"{row}: {what} {', '.join(good) if good else 'no method'}."]


def _figure(
    reproduction: Reproduction, known: Sequence[CellResult], new: Mapping[str, str]
) -> Figure:
    """One panel per row: the accuracy of the mean client, down to the worst tenth, with the bytes.

    Each method has a line of its own, because many methods send the same bytes.
    """
    rows = list(dict.fromkeys(result.cell.row for result in known))
    own = {row: [each for each in known if each.cell.row == row] for row in rows}
    heights = [1 + 0.28 * len(results) for results in own.values()]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.2, 0.6 + sum(heights)), layout="constrained")
        axes = figure.subplots(len(rows), 1, squeeze=False, height_ratios=heights).flat
        for axis, (row, results) in zip(axes, own.items(), strict=True):
            labels = []
            for place, result in enumerate(results):
                megabytes = in_megabytes(sum(total_bytes(result)))
                labels.append(f"{escape_label(result.cell.column)}  ({megabytes} MB)")
                mean, worst = (
                    [
                        scaled("accuracy", value)
                        for value in _values(result, "accuracy", statistic, new, of_new=False)
                    ]
                    for statistic in ("mean", "worst_10")
                )
                if not mean:
                    continue
                top = mean_and_std(mean)[0]
                low = mean_and_std(worst)[0] if worst else top
                axis.plot([low, top], [place, place], color=COLORS[0], linewidth=1)
                axis.plot(low, place, marker="|", color=COLORS[0])
                axis.plot(top, place, marker="o", color=COLORS[0])
            axis.set_yticks(range(len(results)), labels)
            axis.set_ylim(len(results) - 0.5, -0.5)
            axis.set(
                title=escape_label(row),
                xlabel="accuracy % of clients: mean (dot), and mean of the worst tenth (bar)",
            )
        figure.suptitle(escape_label(headline(reproduction)))
        return figure
