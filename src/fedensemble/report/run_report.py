"""The report of one run: a table and its curves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint_file import write_bytes
from ..errors import InputError
from ..experiment.records import simulated
from ..experiment.storage.read_json import need_keys, need_numbers, read_table
from ..experiment.storage.run_folder import RunFolder
from .figures.plots import run_figure, save
from .tables.calibration_tables import calibration_table
from .tables.client_tables import clients_table, fleet_personal_table
from .tables.distillation_tables import distillation_tables
from .tables.result_table import TextTable, run_table, time_table


def write_report(folder: Path, summary: Mapping[str, Any] | None = None) -> TextTable:
    """Writes report.md and curves.png into a run's folder; returns the table."""
    store = RunFolder(folder)
    table, values, records = read_report(folder, summary)
    if store.is_distilled:
        return _write_distilled(store, table)
    save(run_figure(records, table.title), folder / "curves.png")
    state = "" if store.done else f"\nNot finished: {len(records)} of {values['rounds']} rounds.\n"
    state += f"\nDiverged: {divergence}\n" if (divergence := store.divergence()) else ""
    times = time_table(records)
    spent = f"\n## {times.title}\n\n{times.markdown()}" if times else ""
    if summary is None:
        summary = store.summary() if store.done else unfinished(values, records)
    made = calibration_table(summary)
    spent += f"\n## {made.title}\n\n{made.markdown()}" if made else ""
    for by_client in (clients_table(summary), fleet_personal_table(summary)):
        spent += f"\n## {by_client.title}\n\n{by_client.markdown()}" if by_client else ""
    text = f"# {table.title}\n{state}\n{table.markdown()}{spent}\n![curves](curves.png)\n\n"
    text += "Settings: `config.toml`.\n"
    write_bytes(folder / "report.md", text.encode())
    return table


def _write_distilled(store: RunFolder, table: TextTable) -> TextTable:
    """Writes report.md of a distilled model."""
    tables = distillation_tables(read_table(store.distillation_file))
    text = "\n".join(f"## {part.title}\n\n{part.markdown()}" for part in tables)
    content = f"# {table.title}\n\n{text}\nSettings: `config.toml`, `distillation.json`.\n"
    write_bytes(store.path / "report.md", content.encode())
    return table


def read_report(
    folder: Path, summary: Mapping[str, Any] | None = None
) -> tuple[TextTable, dict[str, Any], list[dict[str, Any]]]:
    """The table, the settings and the records of a run."""
    store = RunFolder(folder)
    values, records = store.read_config(), read_records(store)
    if summary is None:
        summary = store.summary() if store.done else unfinished(values, records)
    return run_table(summary, records), values, records


def read_records(store: RunFolder) -> list[dict[str, Any]]:
    """The records of a run's rounds; raises if there is none, or if one lacks a needed value.

    A distilled model has none.
    """
    if store.is_distilled:
        return []
    records = store.metrics()
    if not records:
        raise InputError(f"The run in {store.path} has no finished round yet.")
    for record in records:
        what = f"the record of round {record['round']}"
        need_numbers(store.metrics_file, record, ("visits", "bytes_up", "bytes_down"), what)
        need_keys(store.metrics_file, record, ("loss",), what)
    return records


def unfinished(values: Mapping[str, Any], records: list[dict[str, Any]]) -> dict[str, Any]:
    """The summary of a run that is not finished, from its records so far."""
    tested = [record for record in records if "test" in record]
    return {
        "name": f"{values['name']} (not finished)",
        "modes": values["ensemble"]["modes"],
        "rounds": len(records),
        "bytes_up": sum(record["bytes_up"] for record in records),
        "bytes_down": sum(record["bytes_down"] for record in records),
        **simulated(records),
        **(
            {key: value for key, value in tested[-1].items() if key.startswith("test")}
            if tested
            else {}
        ),
    }
