"""The section of a fleet's run on its clients: their examples, and what went wrong with each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ..tables.result_table import TextTable
from .run_data import RunData
from .summary_sections import Section

NONE = "–"
# keys of the table `fleet` in a round's record, and the titles of their columns
_EVENTS = {"lost": "no reply", "refused": "rejected", "late": "late", "skipped": "suspended"}


def is_fleet(run: RunData) -> bool:
    """Whether a run was trained on the clients of a fleet."""
    return any("fleet" in record for record in run.records)


def fleet(run: RunData) -> Section:
    """The section on the clients of a fleet."""
    content = run.clients
    text = f"{content['clients']:,} clients enrolled with {content['examples']:,} examples."
    tests = content.get("test_examples")
    text += f" The server tests on {tests:,} examples of its own." if tests else ""
    if content.get("published") is False:
        return Section("clients", "Clients", f"{text} Single clients are not published.")
    counts = {key: Counter[str]() for key in _EVENTS}
    reasons: dict[str, str] = {}
    for record in run.records:
        events: Mapping[str, Any] = record.get("fleet", {})
        for key, counter in counts.items():
            counter.update(list(events.get(key, ())))
        reasons |= {
            str(name): f"round {record['round']}: {reason}"
            for key in ("lost", "refused")
            for name, reason in events.get(key, {}).items()
        }
    rows = tuple(
        (
            name,
            f"{size:,}",
            *(f"{counts[key][name]:,}" for key in _EVENTS),
            reasons.get(name, NONE),
        )
        for name, size in zip(content["names"], content["size"], strict=True)
    )
    header = ("client", "examples", *_EVENTS.values(), "last problem")
    shown = len(rows)
    note = (
        f"The first {shown} of {content['clients']:,} clients."
        if shown < content["clients"]
        else ""
    )
    table = TextTable("Clients, and rounds in which they did not count", header, rows)
    return Section("clients", "Clients", text, tables=[table], notes=[note] if note else [])
