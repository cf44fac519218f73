"""Tables of results: as Markdown, as CSV and for the terminal."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...experiment.studies.compare import RowResult, mean_and_std
from ...text import printable
from ..time_to_accuracy import Records, common_target, has_clock, hours, reached, seconds_to

NONE = "–"
PERCENT = {
    "accuracy",
    "mode_accuracy_min",
    "mode_accuracy_max",
    "mode_accuracy_mean",
    "ece",
    "disagreement",
    "adaptive_ece",
    "classwise_ece",
    "coverage_at_5_risk",
    "set_coverage",
    "empty_sets",
    "interval_coverage",
    "auroc",
    "aupr_in",
    "aupr_out",
    "fpr95",
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
    "adaptive_ece": "adaptive ECE %",
    "classwise_ece": "class-wise ECE %",
    "aurc": "AURC",
    "augrc": "AUGRC",
    "coverage_at_5_risk": "coverage at 5 % risk, %",
    "crps": "CRPS",
    "set_coverage": "coverage of sets %",
    "set_size": "classes per set",
    "empty_sets": "empty sets %",
    "interval_coverage": "coverage of intervals %",
    "interval_width": "width of intervals",
    "interval_score": "interval score",
    "auroc": "AUROC %",
    "aupr_in": "AUPR-in %",
    "aupr_out": "AUPR-out %",
    "fpr95": "FPR95 %",
}
UPLOADED, DOWNLOADED = "uploaded, MB", "downloaded, MB"
PREDICTED = "prediction models, MB"
BATCH = "runs per batch"
# keys of a summary, and the titles of their columns
EVALUATIONS = {
    "test": "standard evaluation",
    "test_last": "last modes, without average",
    "test_dropout": "dropout active",
}
CALIBRATED = "after calibration"
LAST_MODES = "last modes"  # beside a metric: without the average over rounds
EXPLAIN_LAST_MODES = "last modes: the current modes, without the average over rounds"
LAST_TESTS = 5  # tests at the end of a run whose mean is shown beside the last one
SHARED_TIME = "the time of runs trained in one batch is each run's share"
NO_INTERVAL = "The spread of the modes is not a prediction interval."
# accuracies for which the table of times has a row
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
        """The table in Markdown, with numeric columns aligned to the right."""
        rules = [
            " ---: " if self.numeric(column) else " --- " for column in range(len(self.header))
        ]
        lines = [f"| {' | '.join(map(_cell, self.header))} |", f"|{'|'.join(rules)}|"]
        lines += [f"| {' | '.join(map(_cell, row))} |" for row in self.rows]
        return "\n".join(lines) + "\n"

    def numeric(self, column: int) -> bool:
        """Whether all cells of a column are numbers; such columns are aligned to the right."""
        return column > 0 and all(row[column][:1] in "-–*0123456789" for row in self.rows)

    def csv(self) -> str:
        """The table as comma-separated values."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([self.header, *self.rows])
        return text.getvalue()


def _cell(text: str) -> str:
    """The text of a Markdown cell: an unescaped bar or a newline would start another cell."""
    return printable(text).replace("|", "\\|")


def comparison_table(results: Sequence[RowResult], metric: str) -> TextTable:
    """One row per method: metrics over seeds, traffic and time; dashes if a run has diverged."""
    first = next(result for result in results if not result.failed)
    available = first.summaries[0].get("test", {})
    shown = [metric] + [name for name in COMPARED if name in available and name != metric]
    # The size of the models is shown only if a run predicts with more or fewer models than modes.
    # Otherwise the number of modes already says how large an ensemble is.
    several = any(
        s.get("prediction_models", s["modes"]) != s["modes"]
        for result in results
        for s in result.summaries
    )
    averaged = any("test_last" in s for result in results for s in result.summaries)
    curves = [records for result in results for records in result.curves]
    tests = fewest_tests(curves, metric)
    together = any(s.get("trained_together", 1) > 1 for r in results for s in r.summaries)
    main, *others = (TITLES.get(name, name) for name in shown)
    header = (
        "method",
        main,
        *[f"{main}, {LAST_MODES}"] * averaged,
        *[f"{main}, {last_tests(tests)}"] * (tests > 1),
        *others,
        UPLOADED,
        *[PREDICTED] * several,
        "time, s",
        *[BATCH] * together,
    )
    clock, target = all(has_clock(records) for records in curves), common_target(curves)
    header += ("simulated time, h",) * clock + ((f"to {100 * target:.0f} %, h",) if target else ())
    rows = []
    for result in results:
        if result.failed:
            rows.append((result.label, *[NONE] * (len(header) - 1)))
            continue
        cells = [_over_seeds(name, result.values(name)) for name in shown]
        if tests > 1:
            means = [mean_of_last(records, metric, tests) for records in result.curves]
            cells.insert(1, _over_seeds(metric, means))
        if averaged:
            last = result.values(metric, "test_last")
            cells.insert(1, _over_seeds(metric, last) if last else NONE)
        uploaded, _ = mean_and_std([summary["bytes_up"] / 1e6 for summary in result.summaries])
        seconds, _ = mean_and_std([summary["seconds"] for summary in result.summaries])
        times = [[records[-1]["clock"] for records in result.curves]] if clock else []
        times += [seconds_to(result.curves, target)] if target else []
        simulated = [hours(mean_and_std(values)[0]) for values in times]
        size = [_prediction(result.summaries[0])] * several
        batch = [batch_size(result.summaries)] * together
        ledger = (f"{uploaded:.1f}", *size, f"{seconds:.1f}", *batch)
        rows.append((result.label, *cells, *ledger, *simulated))
    seeds = len(first.summaries)
    over = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "one seed"
    title = f"Test set, standard evaluation (dropout off), {over}"
    title += f"; {EXPLAIN_LAST_MODES}" if averaged else ""
    title += f"; {SHARED_TIME}" if together else ""
    return TextTable(title, header, tuple(rows))


def batch_size(summaries: Sequence[Mapping[str, Any]]) -> str:
    """How many runs were trained in one batch with each of these; a dash if it is not recorded."""
    sizes = sorted({s["trained_together"] for s in summaries if "trained_together" in s})
    return " to ".join(map(str, dict.fromkeys((sizes[0], sizes[-1])))) if sizes else NONE


def fewest_tests(curves: Sequence[Records], metric: str) -> int:
    """The number of last tests to average: those of the run with fewest, at most `LAST_TESTS`."""
    return min([LAST_TESTS, *(len(_values(records, metric)) for records in curves)])


def last_tests(count: int) -> str:
    """The title of a mean over the last tests."""
    return f"mean of last {count} tests"


def mean_of_last(records: Records, metric: str, count: int, way: str = "test") -> float:
    """The mean of a metric over the last `count` tests of a run; NaN without a test."""
    values = _values(records, metric, way)[-count:]
    return sum(values) / len(values) if values else math.nan


def _values(records: Records, metric: str, way: str = "test") -> list[float]:
    return [record[way][metric] for record in records if metric in record.get(way, {})]


def scaled(metric: str, value: float) -> float:
    """The value of a metric in the unit in which it is shown."""
    return 100 * value if metric in PERCENT else value


def _prediction(summary: Mapping[str, Any]) -> str:
    """Megabytes of the models needed to predict; a dash for runs of versions without this value."""
    return in_megabytes(summary["prediction_bytes"]) if "prediction_bytes" in summary else NONE


def _over_seeds(metric: str, values: Sequence[float]) -> str:
    """Mean and standard deviation over seeds; with one seed, its value."""
    return show(metric, *mean_and_std(values)) if len(values) > 1 else show(metric, values[0])


def run_table(summary: Mapping[str, Any], records: Records = ()) -> TextTable:
    """All metrics of one run, one row each, with one column per kind of evaluation.

    Args:
        summary: of the run.
        records: of its rounds; with several tests, a column has the means of the last ones.
    """
    found = {key: summary[key] for key in EVALUATIONS if key in summary}
    if after := (summary.get("calibration") or {}).get("test"):
        found[CALIBRATED] = after
    present = list(found)
    # Metrics of sets and intervals exist after calibration only.
    names = list(dict.fromkeys(name for metrics in found.values() for name in metrics))
    tests = fewest_tests([records], names[0]) if names else 0
    averaged = tests > 1
    rows = []
    for name in names:
        cells = [show(name, found[key][name]) if name in found[key] else NONE for key in present]
        if averaged:
            mean = mean_of_last(records, name, tests) if name in found[present[0]] else math.nan
            cells.append(show(name, mean) if math.isfinite(mean) else NONE)
        rows.append((TITLES.get(name, name), *cells))
    columns = present or ["value"]
    for name, text in _run_facts(summary):
        # The size is that of the models that predict, and not of the modes without the average.
        predicting = name in ("prediction models", PREDICTED)
        cells = [NONE if predicting and key == "test_last" else text for key in columns]
        rows.append((name, *cells, *[NONE] * averaged))
    modes = f"{summary['modes']} mode{'s' * (summary['modes'] > 1)}"
    title = f"{summary['name']}: {modes}, {summary['rounds']} rounds"
    title += " (diverged)" if "diverged" in summary else ""
    header = ("metric", *(EVALUATIONS.get(key, key) for key in columns))
    header += (last_tests(tests),) * averaged
    return TextTable(title, header, tuple(rows))


def _run_facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values of what a run sent, took and needs to predict."""
    facts = [
        (UPLOADED, in_megabytes(summary["bytes_up"])),
        (DOWNLOADED, in_megabytes(summary["bytes_down"])),
    ]
    if "prediction_models" in summary:
        facts.append(("prediction models", str(summary["prediction_models"])))
        facts.append((PREDICTED, _prediction(summary)))
    if "clock" in summary:
        facts.append(("simulated time, h", hours(summary["clock"])))
    if summary.get("unanswered"):
        facts.append(("rounds without a reply", str(summary["unanswered"])))
    return facts


def time_table(records: Records) -> TextTable | None:
    """Rounds and simulated hours to each accuracy; None without a clock or an accuracy reached."""
    firsts = (
        [(target, reached(records, target)) for target in TARGETS] if has_clock(records) else []
    )
    # If one test reaches several targets at once, only the highest of them is shown.
    highest = {record["round"]: (target, record) for target, record in firsts if record is not None}
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
    """A metric as text, with its spread if given; accuracies are in percent.

    >>> show("accuracy", 0.9512, 0.0041), show("nll", 0.1234)
    ('95.12 ± 0.41', '0.123')
    """
    scale, digits = (100, 2) if metric in PERCENT else (1, 3)
    text = f"{scale * mean:.{digits}f}"
    return text if spread is None else f"{text} ± {scale * spread:.{digits}f}"


def in_megabytes(count: float) -> str:
    """A number of bytes in MB, with two digits at least, so that a small model is not 0.0.

    >>> in_megabytes(24_200_000), in_megabytes(48_400), in_megabytes(0)
    ('24.2', '0.048', '0.0')
    """
    size = count / 1e6
    return f"{size:.1f}" if size >= 1 or not size else f"{size:.2g}"
