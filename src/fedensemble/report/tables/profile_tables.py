"""The tables of a profile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .result_table import TextTable


def profile_tables(facts: Mapping[str, Any]) -> list[TextTable]:
    """The time of a round by phase, and the operations of one round that took longest."""
    device = f", {facts['device_ms']:.1f} ms of it on the GPU" if "device_ms" in facts else ""
    title = f"A round took {facts['ms']:.1f} ms on average of {facts['rounds']}{device}"
    rows = [
        (name, f"{100 * part['share']:.1f}", f"{part['ms']:.2f}")
        for name, part in facts["phases"].items()
    ]
    tables = [TextTable(title, ("phase", "share %", "ms per round"), tuple(rows))]
    if facts["operations"]:
        shown = ("cpu_ms", "device_ms") if "device_ms" in facts else ("cpu_ms",)
        lines = [
            (event["name"], str(event["calls"]), *(f"{event[name]:.2f}" for name in shown))
            for event in facts["operations"]
        ]
        header = ("operation", "calls", "CPU, ms", "GPU, ms")[: 2 + len(shown)]
        tables.append(TextTable("Operations of one round that took longest", header, tuple(lines)))
    return tables
