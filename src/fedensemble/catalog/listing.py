"""The records and tables of `fedensemble ls`: registered plug-ins, and runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import InputError, unknown
from ..experiment.storage.run_folder import find_runs
from ..report.tables.result_table import TextTable
from ..report.tables.run_row import run_record
from .algorithm_facts import describe_algorithm
from .options import HEADER, KINDS, format_options, option_rows, options, summary

_COLUMNS = ("name", "what", "sends")  # keys of a plug-in's record that the table shows


def topics() -> list[dict[str, Any]]:
    """Returns one record per topic of `fedensemble ls`, with the names of its entries."""
    records: list[dict[str, Any]] = [
        {"topic": what, "names": list(kind.registry)} for what, kind in KINDS.items()
    ]
    return [*records, {"topic": "runs", "names": []}]


def topics_table() -> TextTable:
    """Returns the topics as a table."""
    rows = [(record["topic"], ", ".join(record["names"])) for record in topics()]
    rows[-1] = ("runs", "all runs below the folder --runs, with their settings and results")
    return TextTable(
        "What to list: fedensemble ls TOPIC, and for one entry fedensemble ls TOPIC NAME",
        ("topic", "entries"),
        tuple(rows),
    )


def listing(what: str, runs: Path, name: str | None = None) -> list[dict[str, Any]]:
    """Returns one record per plug-in of a kind, or the record of the one called `name`.

    Args:
        what: a key of `KINDS`, or "runs".
        runs: folder under which all runs are stored.
        name: of a plug-in.
    """
    if what == "runs":
        if name is not None:
            raise InputError(
                f"Runs have no names; got '{name}'. To see one, use 'fedensemble report FOLDER'."
            )
        return [run_record(store) for store in find_runs(runs)]
    if what not in KINDS:
        raise InputError(unknown("list", what, [*KINDS, "runs"]))
    kind = KINDS[what]
    records: list[dict[str, Any]] = []
    for plugin in kind.registry if name is None else [name]:
        try:
            item = kind.registry[plugin]
        except InputError as error:
            if name is not None or plugin not in kind.registry:
                raise
            # A plug-in of another package that cannot be imported must not hide the others.
            records.append({"name": plugin, "what": str(error), "options": []})
            continue
        record: dict[str, Any] = {"name": plugin, "what": summary(item)}
        record |= describe_algorithm(item) if what == "algorithms" else {}
        records.append(record | {"options": options(kind, item)})
    return records


def listing_table(what: str, records: list[dict[str, Any]]) -> TextTable:
    """Returns the records as a table; plug-ins with the names and defaults of their options."""
    if what == "runs":
        header = tuple(dict.fromkeys(key for record in records for key in record))
        return TextTable(
            what,
            header,
            tuple(tuple(str(record.get(key, "")) for key in header) for record in records),
        )
    kind = KINDS[what]
    columns = [key for key in _COLUMNS if any(key in record for record in records)]
    option_texts = [
        format_options(kind, kind.registry[record["name"]]) if record["options"] else ""
        for record in records
    ]
    header = (*columns, "options") if any(option_texts) else tuple(columns)
    rows = [
        (*(record.get(key, "") for key in columns), text)
        for record, text in zip(records, option_texts, strict=True)
    ]
    return TextTable(f"{what}: {kind.place}", header, tuple(row[: len(header)] for row in rows))


def option_table(what: str, record: dict[str, Any]) -> TextTable:
    """Returns a table of all options of one plug-in; the title describes it."""
    facts = [
        f"{key.replace('_', ' ')}: {_text(value)}"
        for key, value in record.items()
        if key not in ("name", "what", "options")
    ]
    title = "\n".join(
        [f"{record['name']}: {record['what']}", *facts, f"{what}: {KINDS[what].place}"]
    )
    return TextTable(title, HEADER, option_rows(record["options"]) or (("none", "", "", ""),))


def _text(value: Any) -> str:
    return (", ".join(value) or "none") if isinstance(value, list) else str(value)
