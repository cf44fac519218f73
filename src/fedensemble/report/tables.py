"""Tables of results, as Markdown, CSV and for the terminal."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..experiment.compare import RowResult, summarise

PERCENT = {"accuracy", "mode_accuracy_min", "mode_accuracy_max", "mode_accuracy_mean", "ece", "disagreement"}
TITLES = {
    "accuracy": "accuracy %",
    "mode_accuracy_mean": "modes, mean %",
    "mode_accuracy_min": "worst mode %",
    "mode_accuracy_max": "best mode %",
    "nll": "NLL",
    "brier": "Brier",
    "ece": "ECE %",
    "entropy": "entropy",
    "mode_entropy": "entropy of modes",
    "mutual_information": "mutual information",
    "disagreement": "disagreement %",
    "mse": "MSE",
    "mode_mse_mean": "modes, mean MSE",
    "variance": "variance",
}
COMPARED = ("accuracy", "mode_accuracy_min", "mode_accuracy_max", "nll", "ece", "mse", "mode_mse_mean", "variance")


@dataclass(frozen=True)
class TextTable:
    """A table of text: a title, a header and rows."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """The table in Markdown, first column to the left."""
        lines = [f"| {' | '.join(self.header)} |", f"|{'|'.join([' --- '] + [' ---: '] * (len(self.header) - 1))}|"]
        lines += [f"| {' | '.join(row)} |" for row in self.rows]
        return "\n".join(lines) + "\n"

    def csv(self) -> str:
        """The table as comma-separated values."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([self.header, *self.rows])
        return text.getvalue()


def comparison_table(results: Sequence[RowResult], metric: str) -> TextTable:
    """One line a row: mean and standard deviation over seeds, and what was sent."""
    known = results[0].summaries[0].get("test", {})
    shown = [metric] + [name for name in COMPARED if name in known and name != metric]
    header = ("method", *(TITLES.get(name, name) for name in shown), "sent up, MB", "time, s")
    rows = []
    for result in results:
        cells = [show(name, *summarise(result.values(name))) for name in shown]
        sent, _ = summarise([summary["bytes_up"] / 1e6 for summary in result.summaries])
        seconds, _ = summarise([summary["seconds"] for summary in result.summaries])
        rows.append((result.label, *cells, f"{sent:.1f}", f"{seconds:.1f}"))
    seeds = len(results[0].summaries)
    return TextTable(f"Test set, mean ± standard deviation over {seeds} seed{'s' * (seeds > 1)}", header, tuple(rows))


def run_table(summary: Mapping[str, Any]) -> TextTable:
    """All metrics of one run, one line each, by the way of testing."""
    ways = {"test": "standard evaluation", "test_dropout": "dropout active"}
    present = [way for way in ways if way in summary]
    names = list(summary[present[0]]) if present else []
    rows = [(TITLES.get(n, n), *(show(n, summary[way][n]) for way in present)) for n in names]
    rows += [
        ("sent up, MB", *(f"{summary['bytes_up'] / 1e6:.1f}" for _ in present)),
        ("sent down, MB", *(f"{summary['bytes_down'] / 1e6:.1f}" for _ in present)),
    ]
    title = f"{summary['name']}: {summary['modes']} mode{'s' * (summary['modes'] > 1)}, {summary['rounds']} rounds"
    return TextTable(title, ("metric", *(ways[way] for way in present)), tuple(rows))


def show(metric: str, mean: float, spread: float | None = None) -> str:
    """A number as people read it: accuracies in percent.

    >>> show("accuracy", 0.9512, 0.0041), show("nll", 0.1234)
    ('95.12 ± 0.41', '0.123')
    """
    scale, digits = (100, 2) if metric in PERCENT else (1, 3)
    text = f"{scale * mean:.{digits}f}"
    return text if spread is None else f"{text} ± {scale * spread:.{digits}f}"
