"""Implements `fedensemble tune`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ... import durable
from ...config.search_space import split_spaces
from ...config.sweep import short_names
from ...config.toml import default_file, read_toml, with_settings
from ...engines.distributed.launch import refuse_ranks
from ...errors import InputError
from ...experiment.studies.compare import mean_and_std
from ...experiment.studies.tune import Search, Trial, make_search, tune
from ...report.comparison_report import int_
from ...report.comparison_report import names as split_names
from ...report.tables.result_table import NONE, TITLES, TextTable, show
from ..config import run_config_file
from ..console import console, print_line, print_table
from ..progress import ProgressDisplay

BEST, TABLE = "best.toml", "trials.csv"
SHOWN = 10  # trials of the printed table


def tune_settings(
    file: Path | None,
    settings: Sequence[str],
    trials: int,
    batch: int,
    metric: str | None,
    seeds: str | None,
    runs: Path,
) -> None:
    """Trains the trials of a search, prints the best, and writes best.toml."""
    refuse_ranks("tune")
    if file is not None and file.is_dir():
        file = run_config_file(file)
    single, spaces = split_spaces(settings)
    values = with_settings(read_toml(file or default_file("digits.toml")), single)
    if "row" in values:
        raise InputError(f"{file} is a comparison file: tune takes the config of one run.")
    seed_list = [int_(seed, "--seeds") for seed in split_names(seeds)] if seeds else None
    search = make_search(values, spaces, metric, seed_list)
    names = short_names([space.key for space in spaces])
    with ProgressDisplay(console, runs=trials * len(search.seeds)) as display:
        results = tune(
            search,
            runs,
            trials,
            batch,
            lambda number, chosen, seed: display.callbacks(
                f"trial {number + 1}: {_label(names, chosen.values())}"
                + f", seed {seed}" * (len(search.seeds) > 1)
            ),
            display.finished,
        )
    folder = search.folder(runs)
    table = trials_table(search, results, names)
    durable.write_bytes(folder / TABLE, table.csv().encode())
    best = search.best(results)  # raises if all trials have diverged
    durable.write_bytes(folder / BEST, search.best_config(results).toml(empty=False).encode())
    shown = TextTable(f"{table.title}, best first", table.header, table.rows[:SHOWN])
    print_table(shown)
    if len(results) < trials:
        print_line(f"The spaces have no other values: {len(results)} trials are all there are.")
    print_line(f"Best: {' '.join(f'--set {key}={text}' for key, text in best.settings.items())}")
    print_line(f"All trials: {folder / TABLE}")
    print_line(f"To train the best on all training data: fedensemble run {folder / BEST}")


def trials_table(search: Search, trials: Sequence[Trial], names: Sequence[str]) -> TextTable:
    """Returns the table of all trials, best first; those that have diverged are last."""
    ranked = search.ranked(trials)
    rows = []
    for trial in [*ranked, *(trial for trial in trials if trial.diverged)]:
        value = "diverged"
        if trial.values:
            mean, std = mean_and_std(trial.values)
            value = show(search.metric, mean, std if len(trial.values) > 1 else None)
        rows.append((str(trials.index(trial) + 1), *trial.settings.values(), value))
    diverged = sum(bool(trial.diverged) for trial in trials)
    title = f"{len(trials)} trials" + f", {diverged} diverged" * bool(diverged)
    header = ("trial", *names, f"validation {TITLES.get(search.metric, NONE)}")
    return TextTable(title, header, tuple(rows))


def _label(names: Sequence[str], texts: Iterable[str]) -> str:
    return ", ".join(f"{name} = {text}" for name, text in zip(names, texts, strict=True))
