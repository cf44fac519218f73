"""Pictures: curves of a run, curves of a comparison, and who holds which classes."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from ..checkpoint import write_bytes
from ..data import FederatedData
from ..experiment.compare import RowResult
from .tables import PERCENT, TITLES
from .timing import HOUR, has_clock

COLOURS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#777777")  # Paul Tol's bright scheme
LINES = ("-", "--", ":", "-.")  # when colours run out
STYLE: Any = {
    "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
    "axes.titlesize": 11, "axes.titleweight": "bold", "legend.frameon": False, "savefig.dpi": 150,
}  # fmt: skip


def one_legend(figure: Figure, axes: Iterable[Any]) -> None:
    """A legend below all panels, each label once."""
    named = [pair for axis in axes for pair in zip(*axis.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in named}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles))


def save(figure: Figure, path: Path) -> Path:
    """Writes a figure as PNG, whole or not at all."""
    content = io.BytesIO()
    figure.savefig(content, format="png", bbox_inches="tight", metadata={"Software": None})
    write_bytes(path, content.getvalue())
    return path


def run_figure(records: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Training loss, and the ensemble between its best and worst mode."""
    with mpl.rc_context(STYLE):
        tested = [r for r in records if "test" in r]
        panels = 1 if not tested else 3 if has_clock(records) else 2
        figure = Figure(figsize=(5 * panels, 3.8), layout="constrained")
        left, *others = figure.subplots(1, panels, squeeze=False)[0]
        answered = [r for r in records if r["loss"] is not None]
        left.plot([r["round"] for r in answered], [r["loss"] for r in answered], color=COLOURS[0], linewidth=1.2)
        left.set(xlabel="round", ylabel="training loss of the round's clients", title="Local training")
        if tested:
            right, *timed = others
            metric = "accuracy" if "accuracy" in tested[0]["test"] else "mse"
            low, mean, high = (f"mode_{metric}_{end}" for end in ("min", "mean", "max"))
            x = [r["round"] for r in tested]
            if low in tested[0]["test"]:
                band = [[_scaled(metric, r["test"][end]) for r in tested] for end in (low, high)]
                right.fill_between(x, *band, color=COLOURS[0], alpha=0.2, label="modes, worst to best")
                right.plot(x, [_scaled(metric, r["test"][mean]) for r in tested], color=COLOURS[0], linestyle="--",
                           linewidth=1, label="modes, mean")  # fmt: skip
            right.plot(x, [_scaled(metric, r["test"][metric]) for r in tested], color=COLOURS[1], marker="o",
                       markersize=3, label="ensemble")  # fmt: skip
            right.set(xlabel="round", ylabel=f"test {TITLES[metric]}", title="Ensemble and modes")
            right.legend(loc="best")
            for last in timed:
                hours = [r["clock"] / HOUR for r in tested]
                last.plot(hours, [_scaled(metric, r["test"][metric]) for r in tested], color=COLOURS[1], marker="o",
                          markersize=3)  # fmt: skip
                last.set(xlabel="simulated hours", ylabel=f"test {TITLES[metric]}", title="Ensemble over time")
        figure.suptitle(title)
        return figure


def comparison_figure(results: Sequence[RowResult], metric: str, hours: bool = False) -> Figure:
    """A metric over rounds for each row: mean over seeds, with a band of one standard deviation if rows are few.

    Args:
        hours: over simulated hours in place of rounds, those of a round averaged over seeds.
    """
    many = len(results) > len(COLOURS)
    with mpl.rc_context(STYLE):
        size = (10.0, max(4.6, 0.5 + 0.21 * len(results))) if many else (7.5, 4.6)
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        finals = []
        for index, result in enumerate(results):
            rounds = [record["round"] for record in result.curves[0] if "test" in record]
            if hours:
                clocks = [[r["clock"] / HOUR for r in curve if "test" in r] for curve in result.curves]
                rounds = list(np.mean(clocks, axis=0))
            values = np.array(
                [[_scaled(metric, r["test"][metric]) for r in curve if "test" in r] for curve in result.curves]
            )
            mean = values.mean(0)
            spread = values.std(0, ddof=1) if len(values) > 1 else np.zeros_like(mean)
            colour, line = COLOURS[index % len(COLOURS)], LINES[index // len(COLOURS) % len(LINES)]
            axes.plot(rounds, mean, color=colour, linestyle=line, linewidth=1.6, label=result.label)
            if not many:
                axes.fill_between(rounds, mean - spread, mean + spread, color=colour, alpha=0.15, linewidth=0)
            finals += list(mean[len(mean) // 4 :])
        room = 0.1 * (max(finals) - min(finals)) or 1
        if metric in PERCENT:  # the first rounds would squeeze what matters into a corner
            axes.set_ylim(min(finals) - 2 * room, max(finals) + 2 * room)
        over = "simulated hours" if hours else "communication round"
        axes.set(xlabel=over, ylabel=f"test {TITLES.get(metric, metric)}")
        if many:
            figure.legend(loc="outside right upper", fontsize="small")
        else:
            axes.legend(loc="best")
        return figure


def partition_figure(data: FederatedData, most: int = 100) -> Figure:
    """Clients by classes: the area of a dot is the number of examples."""
    counts = data.label_counts().numpy()[:most]
    clients, classes = counts.shape
    with mpl.rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(min(4 + clients * 0.1, 14), min(2 + classes * 0.22, 9)), layout="constrained")
        axes = figure.subplots()
        client, label = np.nonzero(counts)
        held = counts[client, label]
        axes.scatter(client, label, s=4 + 90 * held / counts.max(), c=held, cmap="viridis", vmin=0)
        axes.set(xlabel="client", ylabel="class", xlim=(-1, clients), ylim=(-0.7, classes - 0.3))
        if classes <= 30:
            axes.set_yticks(range(classes))
        note = f"first {clients} of {len(data)} clients" if clients < len(data) else f"{clients} clients"
        axes.set_title(f"{data.info.get('source', 'data')}, {data.info.get('partition', '')}: {note}")
        return figure


def _scaled(metric: str, value: float) -> float:
    return 100 * value if metric in PERCENT else value
