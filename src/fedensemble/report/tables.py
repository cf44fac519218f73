"""Tables of results, as Markdown, CSV and for the terminal."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..experiment.compare import RowResult, summarise
from ..text import printable
from .time_to_accuracy import Records, common_target, has_clock, hours, reached, seconds_to

NONE = "–"
PERCENT = {
    "accuracy",
    "mode_accuracy_min",
    "mode_accuracy_max",
    "mode_accuracy_mean",
    "ece",
    "disagreement",
}
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
    "mode_mse_min": "best mode, MSE",
    "mode_mse_max": "worst mode, MSE",
    "variance": "variance",
}
PREDICTED = "models to predict with, MB"
# accuracies whose time is told
TARGETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
COMPARED = (
    "accuracy",
    "mode_accuracy_min",
    "mode_accuracy_max",
    "nll",
    "ece",
    "mse",
    "mode_mse_mean",
    "variance",
)


@dataclass(frozen=True)
class TextTable:
    """A table of text: a title, a header and rows."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """The table in Markdown, numbers to the right."""
        rules = [
            " ---: " if self.numeric(column) else " --- " for column in range(len(self.header))
        ]
        lines = [f"| {' | '.join(map(_cell, self.header))} |", f"|{'|'.join(rules)}|"]
        lines += [f"| {' | '.join(map(_cell, row))} |" for row in self.rows]
        return "\n".join(lines) + "\n"

    def numeric(self, column: int) -> bool:
        """Whether a column holds numbers, which go to the right."""
        return column > 0 and all(row[column][:1] in "-–*0123456789" for row in self.rows)

    def csv(self) -> str:
        """The table as comma-separated values."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([self.header, *self.rows])
        return text.getvalue()


def _cell(text: str) -> str:
    """A cell of a Markdown table: a bar or a newline in it would begin another."""
    return printable(text).replace("|", "\\|")


def comparison_table(results: Sequence[RowResult], metric: str) -> TextTable:
    """One line a row: mean and standard deviation over seeds, and what was sent; dashes where a run
    has diverged.
    """
    first = next(result for result in results if not result.failed)
    known = first.summaries[0].get("test", {})
    shown = [metric] + [name for name in COMPARED if name in known and name != metric]
    # Only where some mode predicts with several models: otherwise a row's modes say how large its
    # ensemble is.
    several = any(
        s.get("prediction_models", 0) > s["modes"] for result in results for s in result.summaries
    )
    header = (
        "method",
        *(TITLES.get(name, name) for name in shown),
        "sent up, MB",
        *[PREDICTED] * several,
        "time, s",
    )
    curves = [records for result in results for records in result.curves]
    clock, target = all(has_clock(records) for records in curves), common_target(curves)
    header += ("simulated time, h",) * clock + ((f"to {100 * target:.0f} %, h",) if target else ())
    rows = []
    for result in results:
        if result.failed:
            rows.append((result.label, *[NONE] * (len(header) - 1)))
            continue
        cells = [_over_seeds(name, result.values(name)) for name in shown]
        sent, _ = summarise([summary["bytes_up"] / 1e6 for summary in result.summaries])
        seconds, _ = summarise([summary["seconds"] for summary in result.summaries])
        times = [[records[-1]["clock"] for records in result.curves]] if clock else []
        times += [seconds_to(result.curves, target)] if target else []
        simulated = [hours(summarise(values)[0]) for values in times]
        held = [_prediction(result.summaries[0])] * several
        rows.append((result.label, *cells, f"{sent:.1f}", *held, f"{seconds:.1f}", *simulated))
    seeds = len(first.summaries)
    over = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "one seed"
    title = f"Test set, standard evaluation (dropout off), {over}"
    return TextTable(title, header, tuple(rows))


def _prediction(summary: Mapping[str, Any]) -> str:
    """Megabytes of the models that a prediction takes; runs of older versions do not tell."""
    return f"{summary['prediction_bytes'] / 1e6:.2f}" if "prediction_bytes" in summary else NONE


def _over_seeds(metric: str, values: Sequence[float]) -> str:
    """Mean and spread; one seed has no spread."""
    return show(metric, *summarise(values)) if len(values) > 1 else show(metric, values[0])


def run_table(summary: Mapping[str, Any]) -> TextTable:
    """All metrics of one run, one line each, by the way of testing."""
    ways = {"test": "standard evaluation", "test_dropout": "dropout active"}
    present = [way for way in ways if way in summary]
    names = list(summary[present[0]]) if present else []
    rows = [(TITLES.get(n, n), *(show(n, summary[way][n]) for way in present)) for n in names]
    columns = present or ["value"]
    rows += [
        ("sent up, MB", *(f"{summary['bytes_up'] / 1e6:.1f}" for _ in columns)),
        ("sent down, MB", *(f"{summary['bytes_down'] / 1e6:.1f}" for _ in columns)),
    ]
    if "prediction_models" in summary:
        rows.append(
            ("models to predict with", *(str(summary["prediction_models"]) for _ in columns))
        )
        rows.append((PREDICTED, *(_prediction(summary) for _ in columns)))
    if "clock" in summary:
        rows.append(("simulated time, h", *(hours(summary["clock"]) for _ in columns)))
    if summary.get("unanswered"):
        rows.append(("rounds nobody answered", *(str(summary["unanswered"]) for _ in columns)))
    title = f"{summary['name']}: {summary['modes']} mode{'s' * (summary['modes'] > 1)}, {summary['rounds']} rounds"
    return TextTable(title, ("metric", *(ways.get(way, way) for way in columns)), tuple(rows))


def time_table(records: Records) -> TextTable | None:
    """Rounds and simulated hours to every accuracy a run reached; None without a clock, or if it
    reached none.
    """
    found = [(target, reached(records, target)) for target in TARGETS] if has_clock(records) else []
    # of a test
    highest = {record["round"]: (target, record) for target, record in found if record is not None}
    rows = tuple(
        (f"{100 * target:.0f} %", str(record["round"]), hours(record["clock"]))
        for target, record in highest.values()
    )
    return (
        TextTable("Time to accuracy", ("test accuracy", "round", "simulated hours"), rows)
        if rows
        else None
    )


def show(metric: str, mean: float, spread: float | None = None) -> str:
    """A number as people read it: accuracies in percent.

    >>> show("accuracy", 0.9512, 0.0041), show("nll", 0.1234)
    ('95.12 ± 0.41', '0.123')
    """
    scale, digits = (100, 2) if metric in PERCENT else (1, 3)
    text = f"{scale * mean:.{digits}f}"
    return text if spread is None else f"{text} ± {scale * spread:.{digits}f}"
