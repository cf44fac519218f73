"""Figures: curves of a run, curves of a comparison, and the classes that each client holds."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ...checkpoint_file import write_bytes
from ...data import FederatedData
from ...experiment.studies.compare import RowResult
from ...text import printable
from ..downsample import MAX_LOSS_POINTS, averaged, caption, grouped
from ..palette import LIGHT as COLORS
from ..seed_curves import curve_over_seeds, rounds_with_tests, visible_range
from ..tables.result_table import TITLES, scaled
from ..time_to_accuracy import HOUR, has_clock

LINES = ("-", "--", ":", "-.")  # used in turn when there are more curves than colors
MARKED = 30  # a curve with more points has no markers, which would overlap
# Formats of figures, with the metadata to leave out: they depend on the time and on versions.
FORMATS: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "svg": {"Date": None, "Creator": None},
}
SPREAD = "± one standard deviation over seeds"
STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "legend.frameon": False,
    "savefig.dpi": 150,
}


def one_legend(figure: Figure, axes: Iterable[Any]) -> None:
    """Adds one legend below all panels, with each label once."""
    pairs = [pair for axis in axes for pair in zip(*axis.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in pairs}
    ncols = max(1, min(len(handles), int(figure.get_figwidth() / 1.7)))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=ncols)


def explain_bands(axis: Any) -> None:
    """Adds an entry to the legend that says what the bands are."""
    axis.fill_between([], [], [], color="black", alpha=0.15, linewidth=0, label=SPREAD)


def save(figure: Figure, path: Path) -> Path:
    """Writes a figure as PNG, atomically; returns the path."""
    write_bytes(path, _render(figure, "png"))
    return path


def save_for_print(figure: Figure, path: Path) -> None:
    """Writes a figure as PNG to `path`, and next to it as PDF and SVG, which scale without loss."""
    for format in FORMATS:
        write_bytes(path.with_suffix(f".{format}"), _render(figure, format))


def _render(figure: Figure, format: str) -> bytes:
    """The file of a figure; the same figure gives the same bytes."""
    content = io.BytesIO()
    # Publishers reject PDF files with Type 3 fonts, matplotlib's default; 42 is TrueType. The salt
    # replaces a random one in the identifiers of SVG elements.
    with mpl.rc_context({"pdf.fonttype": 42, "svg.hashsalt": "fedensemble"}):
        figure.savefig(content, format=format, bbox_inches="tight", metadata=FORMATS[format])
    return content.getvalue()


def run_figure(records: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """The curves of a run: training loss, and the ensemble between its best and worst mode."""
    with mpl.rc_context(STYLE):
        tested = [r for r in records if "test" in r]
        panels = 1 if not tested else 3 if has_clock(records) else 2
        figure = Figure(figsize=(5 * panels, 3.8), layout="constrained")
        left, *others = figure.subplots(1, panels, squeeze=False)[0]
        trained = [r for r in records if r["loss"] is not None]
        rounds = [group[-1]["round"] for group in grouped(trained, MAX_LOSS_POINTS)]
        left.plot(
            rounds,
            averaged([r["loss"] for r in trained], MAX_LOSS_POINTS),
            color=COLORS[0],
            linewidth=1.2,
        )
        note = caption(len(trained), MAX_LOSS_POINTS, "rounds")
        left.set(
            xlabel=_add_note("round", note),
            ylabel="training loss of the round's clients",
            title="Local training",
        )
        if tested:
            right, *timed = others
            metric = "accuracy" if "accuracy" in tested[0]["test"] else "mse"
            low, mean, high = (f"mode_{metric}_{end}" for end in ("min", "mean", "max"))
            x = [group[-1]["round"] for group in grouped(tested)]
            note, marker = caption(len(tested)), "o" if len(x) <= MARKED else ""
            ensemble = _curve(tested, metric, metric)
            if low in tested[0]["test"]:
                band = [_curve(tested, metric, end) for end in (low, high)]
                right.fill_between(
                    x, *band, color=COLORS[0], alpha=0.2, label="modes, worst to best"
                )
                right.plot(
                    x,
                    _curve(tested, metric, mean),
                    color=COLORS[0],
                    linestyle="--",
                    linewidth=1,
                    label="modes, mean",
                )
            right.plot(x, ensemble, color=COLORS[1], marker=marker, markersize=3, label="ensemble")
            right.set(
                xlabel=_add_note("round", note),
                ylabel=f"test {TITLES[metric]}",
                title="Ensemble and modes",
            )
            right.legend(loc="best")
            for last in timed:
                hours = [group[-1]["clock"] / HOUR for group in grouped(tested)]
                last.plot(hours, ensemble, color=COLORS[1], marker=marker, markersize=3)
                last.set(
                    xlabel=_add_note("simulated hours", note),
                    ylabel=f"test {TITLES[metric]}",
                    title="Ensemble over time",
                )
        figure.suptitle(title)
        return figure


def comparison_figure(results: Sequence[RowResult], metric: str, hours: bool = False) -> Figure:
    """A metric over rounds for each row: mean over seeds, with bands if there are few rows.

    A band is one standard deviation wide on either side.

    Args:
        hours: draw over simulated hours, averaged over seeds, instead of rounds.
    """
    many = len(results) > len(COLORS)
    with mpl.rc_context(STYLE):
        size = (10.0, max(4.6, 0.5 + 0.21 * len(results))) if many else (7.5, 4.6)
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        series: list[Any] = []
        most_tests = 0
        for index, result in enumerate(results):
            if result.failed:
                continue
            rounds = rounds_with_tests(result.curves)
            most_tests = max(most_tests, len(rounds))
            groups = grouped(rounds)
            x = [float(group[-1]) for group in groups]
            if hours:
                clocks = [{r["round"]: r["clock"] / HOUR for r in curve} for curve in result.curves]
                x = [float(np.mean([clock[at] for clock in clocks])) for at in x]
            mean, spread = map(np.array, curve_over_seeds(result.curves, metric, groups))
            color, line = COLORS[index % len(COLORS)], LINES[index // len(COLORS) % len(LINES)]
            axes.plot(
                x,
                mean,
                color=color,
                linestyle=line,
                linewidth=1.6,
                label=escape_label(result.label),
            )
            if not many:
                axes.fill_between(
                    x, mean - spread, mean + spread, color=color, alpha=0.15, linewidth=0
                )
            series += [mean - spread, mean + spread] if not many else [mean]
        visible, everything = visible_range(series)
        if not everything:
            axes.set_ylim(visible[0], visible[1])
        over = "simulated hours" if hours else "communication round"
        axes.set(
            xlabel=_add_note(over, caption(most_tests)), ylabel=f"test {TITLES.get(metric, metric)}"
        )
        if not many and any(len(result.curves) > 1 for result in results):
            explain_bands(axes)
        if many:
            figure.legend(loc="outside right upper", fontsize="small")
        else:
            axes.legend(loc="best")
        return figure


def partition_figure(data: FederatedData, most: int = 100) -> Figure:
    """Clients by classes: area and color of a dot show the number of examples."""
    counts = data.label_counts().numpy()[:most]
    clients, classes = counts.shape
    with mpl.rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(
            figsize=(min(4 + clients * 0.1, 14), min(2 + classes * 0.22, 9)), layout="constrained"
        )
        axes = figure.subplots()
        client, label = np.nonzero(counts)
        examples = counts[client, label]
        largest = int(counts.max())
        dots: Any = {"cmap": "viridis_r", "vmin": 0, "vmax": largest}
        axes.scatter(client, label, s=_area(examples, largest), c=examples, **dots)
        for count in _sample_counts(examples):
            axes.scatter(
                [],
                [],
                s=_area(count, largest),
                color=mpl.colormaps["viridis_r"](count / largest),
                label=f"{count:,}",
            )
        figure.legend(loc="outside right center", title="examples")
        axes.set(
            xlabel="client", ylabel="class", xlim=(-0.7, clients - 0.3), ylim=(-0.7, classes - 0.3)
        )
        axes.xaxis.set_major_locator(
            MaxNLocator("auto", integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])
        )
        if classes <= 30:
            axes.set_yticks(range(classes), data.class_names)
        note = (
            f"first {clients} of {len(data)} clients"
            if clients < len(data)
            else f"{clients} clients"
        )
        note += f", {counts.sum():,} examples"
        axes.set_title(
            f"{data.info.get('source', 'data')}, {data.info.get('partition', '')}: {note}"
        )
        return figure


def _area(count: Any, most: int) -> Any:
    return 4 + 90 * count / most


def _sample_counts(examples: np.ndarray) -> list[int]:
    """Counts for the legend: all that occur if they are few, else round ones and the largest."""
    counts = [int(count) for count in np.unique(examples)]
    if len(counts) <= 5:
        return counts
    ticks = MaxNLocator(4, integer=True).tick_values(0, counts[-1])
    return [*(int(tick) for tick in ticks if 0 < tick < 0.95 * counts[-1]), counts[-1]]


def _curve(tested: Sequence[Mapping[str, Any]], metric: str, name: str) -> list[float]:
    """The values of a test result in the metric's unit, averaged over neighboring tests."""
    return averaged([scaled(metric, record["test"][name]) for record in tested])


def escape_label(label: str) -> str:
    """A label with dollar signs escaped, because matplotlib reads text between two as a formula."""
    return printable(label).replace("$", r"\$")


def _add_note(label: str, note: str) -> str:
    return f"{label}\n{note}" if note else label
