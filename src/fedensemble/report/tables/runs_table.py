"""Tables for programs: one row per run, and mean and standard deviation over seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...config.schema import Config
from ...experiment.storage.run_folder import RunFolder
from ...experiment.studies.compare import RowResult, mean_and_std, run_folder
from .result_table import TextTable

TOTALS = ("rounds", "bytes_up", "bytes_down", "prediction_bytes", "seconds", "clock")
# keys of a summary, prefixes of columns
EVALUATIONS = {"test": "", "test_last": "last_", "test_dropout": "dropout_"}


def runs_table(
    names: tuple[str, ...], runs: Iterable[tuple[tuple[str, ...], Config]], root: Path
) -> TextTable:
    """One row per finished or diverged run: its names, settings, metrics and totals.

    The columns are `names`, seed, state, the settings in which runs differ, all test metrics (as
    fractions, not percent), rounds, bytes, seconds, and the folder of the run below `root`. Cells
    that a run does not have, such as the metrics of a diverged run, are empty.

    Args:
        names: titles of the columns that name a run, such as "method".
        runs: for each run its values of `names`, and its config.
        root: the folder under which all runs are stored.
    """
    found = [
        (labels, config, store)
        for labels, config in runs
        if (store := RunFolder(run_folder(config, root))).state != "unfinished"
    ]
    settings = _differing([_flatten(config.values()) for _, config, _ in found])
    numbers = [numbers_of(store.summary()) if store.done else {} for _, _, store in found]
    keys = list(dict.fromkeys(key for each in settings for key in each))
    columns = _ordered(numbers)
    rows = [
        (
            *labels,
            str(config.seed),
            store.state,
            *(_text(own.get(key)) for key in keys),
            *(_text(values.get(column)) for column in columns),
            store.path.relative_to(root).as_posix(),
        )
        for (labels, config, store), own, values in zip(found, settings, numbers, strict=True)
    ]
    return TextTable("runs", (*names, "seed", "state", *keys, *columns, "run"), tuple(rows))


def means_table(results: Sequence[RowResult]) -> TextTable:
    """One row per method: mean and standard deviation of all metrics and totals, unrounded.

    The cells of a method with a diverged run are empty; so is the deviation with one seed.
    """
    numbers = [[numbers_of(summary) for summary in result.summaries] for result in results]
    columns = _ordered([values for row in numbers for values in row])
    header = ["method", "seeds", *(f"{name}_{what}" for name in columns for what in ("mean", "sd"))]
    rows = []
    for result, row in zip(results, numbers, strict=True):
        cells = [result.label, str(len(row))]
        for column in columns:
            values = [each[column] for each in row if column in each]
            mean, spread = mean_and_std(values) if values else (None, None)
            cells += [_text(mean), _text(spread if len(values) > 1 else None)]
        rows.append(tuple(cells))
    return TextTable("means", tuple(header), tuple(rows))


def numbers_of(summary: Mapping[str, Any]) -> dict[str, float]:
    """The metrics and totals of a finished run's summary, by the name of their column."""
    metrics = {
        f"{prefix}{name}": value
        for key, prefix in EVALUATIONS.items()
        for name, value in summary.get(key, {}).items()
    }
    totals = {name: summary[name] for name in TOTALS if name in summary}
    # Anything else than a number, such as a list with one value per class, is not a column.
    return {
        name: value
        for name, value in {**metrics, **totals}.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def _ordered(rows: Sequence[Mapping[str, float]]) -> list[str]:
    """The names of all columns: metrics in the order of the summaries, then the totals."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [
        *(name for name in names if name not in TOTALS),
        *(name for name in TOTALS if name in names),
    ]


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted keys, such as "algorithm.lr"."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= (
            _flatten(value, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else {prefix + key: value}
        )
    return flat


def _differing(settings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The settings without those that all runs share, and without the seed, a column of its own."""
    shared = {
        key
        for key in {key for each in settings for key in each}
        if all(key in each and each[key] == settings[0].get(key) for each in settings)
    }
    return [
        {key: value for key, value in each.items() if key not in shared | {"seed"}}
        for each in settings
    ]


def _text(value: Any) -> str:
    """A cell of a CSV file; floats with the fewest digits that give back the same number."""
    return "" if value is None else str(value)
