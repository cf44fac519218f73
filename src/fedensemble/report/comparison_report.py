"""The report of a comparison, and the comparison that a command line asks for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ..checkpoint_file import write_bytes
from ..config.sweep import cross, split_sweeps
from ..config.toml import Values, default_file, read_toml, with_settings
from ..errors import InputError
from ..experiment.studies.compare import (
    Comparison,
    RowResult,
    failures,
    make_comparison,
    read_comparison,
)
from .bibliography import bibliography
from .figures.plots import comparison_figure, save_for_print
from .tables.best import best_by_column
from .tables.client_tables import CLIENTS_FILE, compare_clients
from .tables.latex import latex
from .tables.result_table import TextTable, comparison_table
from .tables.runs_table import means_table, runs_table
from .time_to_accuracy import has_clock


def find_comparison(
    file: Path | None,
    settings: Sequence[str],
    algorithms: str | None,
    modes: str | None,
    schedules: str | None,
    seeds: str | None,
) -> Comparison:
    """The comparison that options define: the rows of a file, or all combinations of values."""
    seed_list = [int_(seed, "--seeds") for seed in names(seeds)] if seeds else None
    single, sweeps = split_sweeps(settings)
    values = read_toml(file or default_file("digits.toml"))
    if "row" in values and file is not None:
        if algorithms or modes or schedules:
            raise InputError(
                f"{file} lists its own rows; --algorithms, --modes and --schedules need a config "
                "file without rows."
            )
        return read_comparison(file, settings, seed_list)
    if not (algorithms or modes or schedules or sweeps):
        if file is None:
            return read_comparison(default_file("compare.toml"), settings, seed_list)
        raise InputError(
            f"{file} has no rows to compare: add --algorithms, --modes, --schedules or several "
            "values such as --set algorithm.lr=0.1,0.3, or [[row]] tables."
        )
    base = with_settings(values, single)
    seed_list = seed_list or [0, 1, 2]
    factors = [
        [(name, {"algorithm": {"name": name}} if name else {}) for name in names(algorithms)],
        [(name, {"ensemble": {"schedule": name}} if name else {}) for name in names(schedules)],
        [_modes_row(mode) for mode in names(modes)],
    ]
    rows = cross(factors, sweeps, len(seed_list))
    metric = "mse" if base.get("training", {}).get("loss") == "mse" else "accuracy"
    return make_comparison(base.get("name", "compare"), base, rows, seed_list, metric)


def _modes_row(mode: str) -> tuple[str, Values]:
    """The label and the settings of a value of --modes; one mode has one stratum."""
    if not mode:
        return "", {}
    count = int_(mode, "--modes")
    # One mode with one stratum is the base method itself.
    single = {"strata": 1} if count == 1 else {}
    return f"K = {mode}", {"ensemble": {"modes": count, **single}}


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
    folder: Path, comparison: Comparison, results: Sequence[RowResult], root: Path
) -> TextTable:
    """Writes the files of a comparison and returns its table.

    The files are report.md, the table as table.csv and table.tex, one row per run in runs.csv,
    references.bib, runs.json, and the figure "curves" as PNG, PDF and SVG; with "time" as another
    figure if all runs have a simulated clock, and clients.csv if test rows belong to clients.

    Args:
        root: folder under which all runs are stored.
    """
    table = comparison_table(results, comparison.metric)
    runs = [((row.label,), config) for row in comparison.rows for config in row.configs]
    files = {
        "table.csv": means_table(results).csv(),
        "table.tex": latex(table, comparison.name, best_by_column(table)),
        "runs.csv": runs_table(("method",), runs, root).csv(),
        "references.bib": bibliography(config.algorithm["name"] for _, config in runs),
    }
    for name, content in files.items():
        write_bytes(folder / name, content.encode())
    save_for_print(comparison_figure(results, comparison.metric), folder / "curves.png")
    folders = {result.label: [str(path) for path in result.folders] for result in results}
    write_bytes(folder / "runs.json", (json.dumps(folders, indent=2) + "\n").encode())
    text = f"# {comparison.name}\n\n{table.title}.\n\n{table.markdown()}\n"
    text += "".join(f"- {line}\n" for line in failures(results)) + "\n" * any(
        result.failed for result in results
    )
    by_client = compare_clients(results, comparison.metric)
    if by_client is not None:
        write_bytes(folder / CLIENTS_FILE, by_client.csv().encode())
        text += f"## {by_client.title}\n\n{by_client.markdown()}\n"
    text += "![curves](curves.png)\n"
    if all(has_clock(records) for result in results for records in result.curves):
        timed = comparison_figure(results, comparison.metric, hours=True)
        save_for_print(timed, folder / "time.png")
        text += "\n![curves over simulated time](time.png)\n"
    write_bytes(folder / "report.md", text.encode())
    return table
