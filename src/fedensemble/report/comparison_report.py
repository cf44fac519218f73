"""The report of a comparison, and the comparison that a command line asks for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from ..checkpoint_file import write_bytes
from ..config.toml import Values, default_file, merge, read_toml, with_settings
from ..errors import InputError
from ..experiment.compare import Comparison, RowResult, failures, make_comparison, read_comparison
from .figures.plots import comparison_figure, save
from .tables import TextTable, comparison_table
from .time_to_accuracy import has_clock


def find_comparison(
    file: Path | None,
    settings: Sequence[str],
    algorithms: str | None,
    modes: str | None,
    schedules: str | None,
    seeds: str | None,
) -> Comparison:
    """The comparison that options define: the rows of a file, or all combinations of names."""
    seed_list = [int_(seed, "--seeds") for seed in names(seeds)] if seeds else None
    if not (algorithms or modes or schedules):
        path = file or default_file("compare.toml")
        if file is not None and "row" not in read_toml(file):
            raise InputError(
                f"{file} has no rows to compare: add --algorithms, --modes or --schedules, "
                "or [[row]] tables."
            )
        return read_comparison(path, settings, seed_list)
    base = with_settings(read_toml(file or default_file("digits.toml")), settings)
    if "row" in base:
        raise InputError(
            f"{file} lists its own rows; --algorithms, --modes and --schedules need a config file "
            "without rows."
        )
    rows: list[tuple[str, Values]] = []
    for algorithm, mode, schedule in product(names(algorithms), names(modes), names(schedules)):
        changes: Values = {}
        label = []
        if algorithm:
            changes = merge(changes, {"algorithm": {"name": algorithm}})
            label.append(algorithm)
        if schedule:
            changes = merge(changes, {"ensemble": {"schedule": schedule}})
            label.append(schedule)
        if mode:
            count = int_(mode, "--modes")
            # One mode with one stratum is the base method itself.
            single = {"strata": 1} if count == 1 else {}
            changes = merge(changes, {"ensemble": {"modes": count, **single}})
            label.append(f"K = {mode}")
        rows.append((", ".join(label), changes))
    metric = "mse" if base.get("training", {}).get("loss") == "mse" else "accuracy"
    return make_comparison(base.get("name", "compare"), base, rows, seed_list or [0, 1, 2], metric)


def names(text: str | None) -> list[str]:
    """The parts of a text such as "a,b"; one empty part for None."""
    return [part.strip() for part in text.split(",") if part.strip()] if text else [""]


def int_(text: str, option: str) -> int:
    """The integer that a command-line option holds; raises InputError for anything else."""
    try:
        return int(text)
    except ValueError:
        raise InputError(f"{option} takes integers separated by commas; got '{text}'.") from None


def write_comparison(
    folder: Path, comparison: Comparison, results: Sequence[RowResult]
) -> TextTable:
    """Writes the files of a comparison and returns its table.

    The files are report.md, table.csv, curves.png and runs.json, and time.png if all runs have a
    simulated clock.
    """
    table = comparison_table(results, comparison.metric)
    save(comparison_figure(results, comparison.metric), folder / "curves.png")
    write_bytes(folder / "table.csv", table.csv().encode())
    folders = {result.label: [str(path) for path in result.folders] for result in results}
    write_bytes(folder / "runs.json", (json.dumps(folders, indent=2) + "\n").encode())
    text = f"# {comparison.name}\n\n{table.title}.\n\n{table.markdown()}\n"
    text += "".join(f"- {line}\n" for line in failures(results)) + "\n" * any(
        result.failed for result in results
    )
    text += "![curves](curves.png)\n"
    if all(has_clock(records) for result in results for records in result.curves):
        save(comparison_figure(results, comparison.metric, hours=True), folder / "time.png")
        text += "\n![curves over simulated time](time.png)\n"
    write_bytes(folder / "report.md", text.encode())
    return table
