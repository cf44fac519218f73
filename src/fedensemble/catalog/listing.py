"""What there is: plug-ins by name, with a line of explanation, and runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import InputError, unknown
from ..experiment.run_folder import find_runs
from ..report.run_row import run_record
from ..report.tables import TextTable
from .algorithm_facts import describe_method
from .options import HEADER, KINDS, in_brief, option_rows, options, summary

_COLUMNS = ("name", "what", "sends")  # of plug-ins, in a table; a record has more


def listing(what: str, runs: Path, name: str | None = None) -> list[dict[str, Any]]:
    """Everything of a kind, or the one of that name: a record each."""
    if what == "runs":
        if name is not None:
            raise InputError(
                f"Runs have no names to list one by; got '{name}'. Use 'fedensemble report FOLDER'."
            )
        return [run_record(store) for store in find_runs(runs)]
    if what not in KINDS:
        raise InputError(unknown("list", what, [*KINDS, "runs"]))
    kind = KINDS[what]
    records: list[dict[str, Any]] = []
    for chosen in kind.registry if name is None else [name]:
        try:
            item = kind.registry[chosen]
        except InputError as error:
            if name is not None or chosen not in kind.registry:
                raise
            # the others are listed all the same
            records.append({"name": chosen, "what": str(error), "options": []})
            continue
        record: dict[str, Any] = {"name": chosen, "what": summary(item)}
        record |= describe_method(item) if what == "algorithms" else {}
        records.append(record | {"options": options(kind, item)})
    return records


def listing_table(what: str, records: list[dict[str, Any]]) -> TextTable:
    """The records as a table; plug-ins with their options in brief."""
    if what == "runs":
        header = tuple(dict.fromkeys(key for record in records for key in record))
        return TextTable(
            what,
            header,
            tuple(tuple(str(record.get(key, "")) for key in header) for record in records),
        )
    kind = KINDS[what]
    shown = [key for key in _COLUMNS if any(key in record for record in records)]
    brief = [
        in_brief(kind, kind.registry[record["name"]]) if record["options"] else ""
        for record in records
    ]
    header = (*shown, "options") if any(brief) else tuple(shown)
    rows = [
        (*(record.get(key, "") for key in shown), text)
        for record, text in zip(records, brief, strict=True)
    ]
    return TextTable(f"{what}: {kind.place}", header, tuple(row[: len(header)] for row in rows))


def option_table(what: str, record: dict[str, Any]) -> TextTable:
    """All of one plug-in: what it is, and each of its options."""
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
