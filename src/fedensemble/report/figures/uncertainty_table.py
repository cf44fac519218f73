"""Tables of uncertainty: clean and corrupted test images, and data out of distribution.

Metrics have names with parts between slashes: "nll" of the test set, "corrupted/nll" as the mean
over all corruptions and severities, "severity 3/nll" and "fog/nll" as the mean over the others of
the two, and "Fashion-MNIST/entropy/auroc" of data out of distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from ...data.corruptions import CORRUPTIONS, SEVERITIES
from ...errors import InputError
from ...experiment.studies.compare import mean_and_std
from ...experiment.studies.paper_table import Reproduction
from ...experiment.studies.reproduce import CellResult
from ...uncertainty.scores import SCORES
from ..palette import LIGHT as COLORS
from ..tables.best import HIGHER_IS_BETTER, best_places
from ..tables.result_table import NONE, TITLES, UPLOADED, TextTable, in_megabytes, scaled, show
from .method_table import HEADER, SEEDS, difference, values_by_seed
from .paper_grid import PaperReport, headline
from .plots import LINES, STYLE, escape_label, one_legend

CLEAN = ("accuracy", "nll", "ece")
MODELS = "models"  # that a prediction runs
CHOSEN_SCORE = "entropy"  # of which all detection metrics are shown; the others have their AUROC
Values = Mapping[str, Mapping[int, float]]  # by metric and seed


class Study:
    """The results of all methods, by row and method.

    The options of the table name the methods: `baseline` that all others are compared with, `ours`
    and `references` for the sentences on where one is better.
    """

    def __init__(self, reproduction: Reproduction, results: Sequence[CellResult]) -> None:
        options = reproduction.table.options
        self.baseline, self.ours = str(options.get("baseline", "")), str(options.get("ours", ""))
        self.references = [str(name) for name in options.get("references", ())]
        labels = {result.cell.column for result in results}
        for name in (self.baseline, self.ours, *self.references):
            if name not in labels:
                raise InputError(
                    f"{reproduction.name}: options.baseline, ours and references must be labels of "
                    f"columns; got {name!r}."
                )
        self.known = [result for result in results if result.runs is not None]
        self.rows = list(dict.fromkeys(result.cell.row for result in self.known))
        self.values = {(r.cell.row, r.cell.column): collect_values(r) for r in self.known}

    def of_row(self, row: str) -> list[CellResult]:
        """The results of a row, by method."""
        return [result for result in self.known if result.cell.row == row]

    def metric(self, result: CellResult, metric: str) -> Mapping[int, float]:
        """A metric by seed; empty if it is not known."""
        return self.values.get((result.cell.row, result.cell.column), {}).get(metric, {})

    def gap(self, result: CellResult, metric: str, reference: str) -> tuple[float, float]:
        """The mean difference to a method and half of its interval; NaN if it is not known."""
        theirs = self.values.get((result.cell.row, reference), {}).get(metric, {})
        return difference(self.metric(result, metric), theirs)


def uncertainty(reproduction: Reproduction, results: Sequence[CellResult]) -> PaperReport:
    """The tables of clean images, of corruptions and of data out of distribution, with figures."""
    study = Study(reproduction, results)
    title = headline(reproduction)
    shown, best = _clean_table(study, title)
    notes = []
    for heading, table in (
        ("Corrupted test images", _corruption_table(study)),
        ("Data out of distribution", _ood_table(study)),
    ):
        if table.rows:
            notes += [f"### {heading}", table.markdown()]
    notes += _explain(study)
    verdicts = [line for row in study.rows for line in compare_methods(study, row)]
    if verdicts:
        notes += ["### Where the ensemble is better, and where not", "\n".join(verdicts)]
    figures = {}
    corrupted = [row for row in study.rows if any(_severity(study, row, "nll").values())]
    if corrupted:
        figures["severity.png"] = _severity_figure(study, corrupted, title)
    if sets := _ood_sets(study):
        figures["ood.png"] = _ood_figure(study, sets, title)
    numbers = TextTable("numbers", HEADER, tuple(_numbers(study)))
    values: dict[str, dict[str, Values]] = {}
    for (row, method), metrics in study.values.items():
        values.setdefault(row, {})[method] = metrics
    return PaperReport(shown, numbers, figures, notes, best, values)


def collect_values(result: CellResult) -> dict[str, dict[int, float]]:
    """All metrics of a cell by name and seed; see the top of this file."""
    found: dict[str, dict[int, float]] = {
        metric: values_by_seed(result, metric) for metric in CLEAN
    }
    for seed, tests in result.shift().items():
        for name, value in _flat(tests):
            found.setdefault(name, {})[seed] = value
    return {name: values for name, values in found.items() if values}


def _flat(tests: Mapping[str, Mapping[str, object]]) -> Iterator[tuple[str, float]]:
    """The results of one run as names and values."""
    corruptions: Mapping[str, Mapping[str, Mapping[str, float]]] = tests["corruptions"].get(  # type: ignore[assignment]
        "metrics", {}
    )
    for metric in CLEAN:
        table = np.array(
            [
                [by_severity[str(s)][metric] for s in SEVERITIES]
                for by_severity in corruptions.values()
            ]
        )
        if not table.size:
            continue
        yield f"corrupted/{metric}", float(table.mean())
        for severity, mean in zip(SEVERITIES, table.mean(0), strict=True):
            yield f"severity {severity}/{metric}", float(mean)
        for name, mean in zip(corruptions, table.mean(1), strict=True):
            yield f"{name}/{metric}", float(mean)
    for name, scores in tests["ood"].items():
        for score, metrics in scores.items():  # type: ignore[attr-defined]
            for metric, value in metrics.items():
                yield f"{name}/{score}/{metric}", value


def unit(metric: str) -> str:
    """The last part of a metric's name, which decides its unit and its direction."""
    return metric.rpartition("/")[2]


def title_of(metric: str) -> str:
    """The name of a metric for readers.

    >>> title_of("corrupted/nll"), title_of("CIFAR10/entropy/auroc")
    ('cNLL', 'AUROC % of CIFAR10 by entropy')
    """
    first, *others = metric.split("/")
    if not others:
        return TITLES[metric]
    if first == "corrupted":
        return {"accuracy": "cA %", "nll": "cNLL", "ece": "cECE %"}[others[0]]
    if len(others) == 1:
        return f"{TITLES[others[0]]} under {first}"
    return f"{TITLES[others[1]]} of {first} by {others[0].replace('_', ' ')}"


def _cell(study: Study, result: CellResult, metric: str) -> str:
    values = list(study.metric(result, metric).values())
    if not values:
        return NONE
    mean, spread = mean_and_std(values)
    return show(unit(metric), mean, spread if len(values) > 1 else None)


def _gap_cell(study: Study, result: CellResult, metric: str) -> str:
    if result.cell.column == study.baseline:
        return NONE
    mean, half = study.gap(result, metric, study.baseline)
    if math.isnan(mean):
        return NONE
    text = show(unit(metric), mean, None if math.isnan(half) else half)
    return text if text.startswith("-") else f"+{text}"


def _marked(
    lines: Sequence[Sequence[str]], first: int, metrics: Sequence[str], column: int
) -> set[tuple[int, int]]:
    """The best cells of the lines from `first` on, whose metrics begin at a column."""
    return {
        (first + place, column + index)
        for index, metric in enumerate(metrics)
        for place in best_places(unit(metric), [line[column + index] for line in lines[first:]])
    }


def _clean_table(study: Study, title: str) -> tuple[TextTable, set[tuple[int, int]]]:
    """One line per method: metrics of the test set, and differences to the baseline."""
    lines: list[tuple[str, ...]] = []
    best: set[tuple[int, int]] = set()
    for row in study.rows:
        first = len(lines)
        for result in study.of_row(row):
            assert result.runs is not None
            summaries = result.runs.summaries
            uploaded = mean_and_std([summary["bytes_up"] for summary in summaries])[0]
            # An evaluation without average runs one model per mode.
            plain = result.cell.way == "test_last"
            models = summaries[0]["modes" if plain else "prediction_models"]
            metrics = [_cell(study, result, metric) for metric in CLEAN]
            gaps = [_gap_cell(study, result, metric) for metric in CLEAN]
            traffic = (in_megabytes(uploaded), str(models), str(len(summaries)))
            lines.append((row, result.cell.column, *metrics, *gaps, *traffic))
        best |= _marked(lines, first, CLEAN, 2)
    titles = [title_of(metric) for metric in CLEAN]
    header = ("", "method", *titles, *_minus(titles, study), UPLOADED, MODELS, SEEDS)
    return TextTable(title, header, tuple(lines)), best


def _minus(titles: Sequence[str], study: Study) -> list[str]:
    return [f"{title}, minus {study.baseline}" for title in titles]


def _table(
    study: Study, metrics: Sequence[str], gaps: Sequence[str], rows: Sequence[str]
) -> tuple[tuple[str, ...], ...]:
    """Lines of methods with results, the best ones in bold; without the name of the row."""
    lines: list[list[str]] = []
    for row in rows:
        own = [r for r in study.of_row(row) if any(study.metric(r, metric) for metric in metrics)]
        first = len(lines)
        for result in own:
            cells = [_cell(study, result, metric) for metric in metrics]
            differences = [_gap_cell(study, result, metric) for metric in gaps]
            lines.append([row, result.cell.column, *cells, *differences])
        for line, column in _marked(lines, first, metrics, 2):
            lines[line][column] = f"**{lines[line][column]}**"
    return tuple(map(tuple, lines))


def _corruption_table(study: Study) -> TextTable:
    metrics = [f"corrupted/{metric}" for metric in CLEAN]
    titles = [title_of(metric) for metric in metrics]
    header = ("", "method", *titles, *_minus(titles, study))
    return TextTable("corruptions", header, _table(study, metrics, metrics, study.rows))


def _ood_sets(study: Study) -> list[tuple[str, str]]:
    """Rows and the names of their data out of distribution with results."""
    suffix = f"/{CHOSEN_SCORE}/auroc"
    found = [
        (row, metric.removesuffix(suffix))
        for (row, _), values in study.values.items()
        for metric in values
        if metric.endswith(suffix)
    ]
    return list(dict.fromkeys(found))


def _ood_table(study: Study) -> TextTable:
    lines: list[tuple[str, ...]] = []
    for row, name in _ood_sets(study):
        chosen = f"{name}/{CHOSEN_SCORE}"
        metrics = [f"{name}/{score}/auroc" for score in SCORES]
        metrics += [f"{chosen}/{metric}" for metric in ("aupr_in", "aupr_out", "fpr95")]
        for first, *others in _table(study, metrics, [f"{chosen}/auroc"], [row]):
            lines.append((f"{first} → {name}", *others))
    header = (
        "",
        "method",
        *(f"AUROC %, {score.replace('_', ' ')}" for score in SCORES),
        *(f"{TITLES[name]}, {CHOSEN_SCORE}" for name in ("aupr_in", "aupr_out", "fpr95")),
        f"AUROC %, {CHOSEN_SCORE}, minus {study.baseline}",
    )
    return TextTable("out of distribution", header, tuple(lines))


def _explain(study: Study) -> list[str]:
    """What the columns are, in one paragraph."""
    images = {
        result.cell.row: result.cell.shift
        for result in study.known
        if result.cell.shift is not None
    }
    text = []
    counts = [
        f"{table.corrupted_images:,} of {row}"
        for row, table in images.items()
        if table.corrupted_images
    ]
    if counts:
        text.append(
            f"cA, cNLL and cECE are means over {len(CORRUPTIONS)} corruptions at "
            f"{len(SEVERITIES)} severities, made from the first test images ({', '.join(counts)}) "
            "with the constants of CIFAR10-C; frost, the 15th, needs photographs and is absent. "
            "Severity 0 in the figure is the whole test set."
        )
    if any(table.ood for table in images.values()):
        most = max(table.ood_images for table in images.values())
        text.append(
            "Data out of distribution are the positive class; theirs are the first "
            f"{most:,} test images, turned gray or given three equal channels, and resized. FPR95 "
            "is the share of test images that are flagged if 95 % of the others are. With one "
            "model, mutual information and variation ratio are constant, and their AUROC is 50 %."
        )
    text.append(
        "Differences are paired by seed, ± half of the 95 % interval (Student's t). "
        f"{MODELS}: that a prediction runs."
    )
    return [" ".join(text)]


def compare_methods(study: Study, row: str) -> list[str]:
    """Sentences on where our method is better than each reference, and where not.

    With several seeds, only differences whose interval excludes 0 count; with one seed, all do.
    """
    ours = next((r for r in study.of_row(row) if r.cell.column == study.ours), None)
    if ours is None:
        return []
    sets = [name for other, name in _ood_sets(study) if other == row]
    metrics = [*CLEAN, *(f"corrupted/{metric}" for metric in CLEAN)]
    metrics += [
        f"{name}/{score}/auroc" for name in sets for score in (CHOSEN_SCORE, "max_probability")
    ]
    lines = []
    for reference in study.references:
        groups: dict[str, list[str]] = {"better": [], "worse": [], "no clear difference": []}
        for metric in metrics:
            mean, half = study.gap(ours, metric, reference)
            if math.isnan(mean):
                continue
            clear = abs(mean) > (0 if math.isnan(half) else half)
            better = (mean > 0) == HIGHER_IS_BETTER[unit(metric)]
            verdict = ("better" if better else "worse") if clear else "no clear difference"
            groups[verdict].append(title_of(metric).replace(" %", ""))
        found = [f"{verdict} in {', '.join(names)}" for verdict, names in groups.items() if names]
        if found:
            lines.append(f"- {row}, {study.ours} against {reference}: {'; '.join(found)}.")
            lines[-1] += _ratios(study, ours, reference)
    return lines


def _ratios(study: Study, ours: CellResult, reference: str) -> str:
    """How many times the reference's cNLL and cECE our method has; empty if they are not known."""
    parts = []
    for metric in ("corrupted/nll", "corrupted/ece"):
        theirs = study.values.get((ours.cell.row, reference), {}).get(metric)
        own = study.metric(ours, metric)
        if theirs and own:
            ratio = mean_and_std(list(own.values()))[0] / mean_and_std(list(theirs.values()))[0]
            parts.append(f"{title_of(metric).removesuffix(' %')} {ratio:.2f} times")
    return f" {' and '.join(parts)} that of {reference}." if parts else ""


def _numbers(study: Study) -> Iterator[tuple[str, ...]]:
    """One line per row, method and metric, for programs."""
    for result in study.known:
        for metric, ours in study.values[result.cell.row, result.cell.column].items():
            gap = study.gap(result, metric, study.baseline)
            values = (*mean_and_std(list(ours.values())), *gap)
            texts = ["" if math.isnan(value) else f"{value:.6g}" for value in values]
            yield result.cell.row, result.cell.column, metric, *texts, str(len(ours))


def _severity(study: Study, row: str, metric: str) -> dict[str, list[float]]:
    """A metric by method at severities 0 (the test set) to 5; without methods not tested."""
    curves = {}
    for result in study.of_row(row):
        names = [metric, *(f"severity {severity}/{metric}" for severity in SEVERITIES)]
        values = [study.metric(result, name) for name in names]
        if all(values):
            curves[result.cell.column] = [mean_and_std(list(v.values()))[0] for v in values]
    return curves


def _severity_figure(study: Study, rows: Sequence[str], title: str) -> Figure:
    """One panel per row and metric: a curve per method over the severity of corruptions."""

    def draw(axis: mpl.axes.Axes, row: str, metric: str) -> None:
        for index, (method, means) in enumerate(_severity(study, row, metric).items()):
            axis.plot(
                (0, *SEVERITIES),
                [scaled(metric, mean) for mean in means],
                **_line(index),
                label=escape_label(method),
            )
        axis.set(title=escape_label(row), xlabel="severity", ylabel=TITLES[metric])

    return _panels(title, [[(row, metric) for metric in CLEAN] for row in rows], draw)


def _ood_figure(study: Study, sets: Sequence[tuple[str, str]], title: str) -> Figure:
    """One panel per pair of data: the AUROC of each method by each score."""

    def draw(axis: mpl.axes.Axes, row: str, name: str) -> None:
        own = study.of_row(row)
        for index, score in enumerate(SCORES):
            metric = f"{name}/{score}/auroc"
            means = [list(study.metric(result, metric).values()) for result in own]
            shown = [(place, mean_and_std(v)[0]) for place, v in enumerate(means) if v]
            if shown:
                axis.plot(
                    [scaled("auroc", mean) for _, mean in shown],
                    [place for place, _ in shown],
                    **{**_line(index), "linestyle": "none"},
                    label=score.replace("_", " "),
                )
        axis.set_yticks(range(len(own)), [escape_label(result.cell.column) for result in own])
        axis.invert_yaxis()
        axis.set(title=escape_label(f"{row} → {name}"), xlabel=TITLES["auroc"])

    return _panels(title, [list(sets)], draw, width=4.6)


def _line(index: int) -> dict[str, Any]:
    return {
        "color": COLORS[index % len(COLORS)],
        "linestyle": LINES[index // len(COLORS) % len(LINES)],
        "marker": "o",
        "markersize": 4,
    }


def _panels(
    title: str,
    rows: Sequence[Sequence[tuple[str, str]]],
    draw: Callable[[mpl.axes.Axes, str, str], None],
    width: float = 3.8,
) -> Figure:
    """A figure with one panel per pair, drawn by a function."""
    with mpl.rc_context(STYLE):
        size = (width * len(rows[0]), 3.4 * len(rows) + 0.8)
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(len(rows), len(rows[0]), squeeze=False)
        for row_of_axes, row in zip(axes, rows, strict=True):
            for axis, pair in zip(row_of_axes, row, strict=True):
                draw(axis, *pair)
        one_legend(figure, axes.flatten())
        figure.suptitle(escape_label(title))
        return figure
