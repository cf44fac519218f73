"""The table of a run's calibration: temperatures, level, rows and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .result_table import TextTable, in_megabytes, show

_SCOPES = {
    "mixture": "rows of the clients together",
    "pool": "rows of a client drawn at random",
    "client": "the rows of each client",
    "class": "the rows of each class",
}
_MOST_SHOWN = 10  # temperatures; the others are in modes.safetensors


def calibration_table(summary: Mapping[str, Any]) -> TextTable | None:
    """What was calibrated by how many rows; None if nothing was."""
    made = summary.get("calibration")
    if not made:
        return None
    rows = []
    if made["temperatures"]:
        shown = ", ".join(f"{value:.3f}" for value in made["temperatures"][:_MOST_SHOWN])
        more = len(made["temperatures"]) - _MOST_SHOWN
        name = "temperature of the mean" if made["temperature"] == "mean" else "temperatures"
        rows.append((name, shown + (f" and {more} more" if more > 0 else "")))
        before, after = (show("nll", value) for value in made["nll"])
        rows.append(("NLL on calibration rows, before", before))
        rows.append(("NLL on calibration rows, after", after))
    if made["method"] != "none":
        rows.append(("method", str(made["method"])))
        rows.append(("coverage asked for, %", f"{100 * (1 - made['alpha']):g}"))
        rows.append(("coverage holds for", _SCOPES[made["scope"]]))
    rows += [
        ("calibration rows", f"{made['rows']:,}"),
        ("clients with such rows", f"{made['clients']:,}"),
        ("uploaded, MB", in_megabytes(made["bytes_up"])),
        ("downloaded, MB", in_megabytes(made["bytes_down"])),
    ]
    return TextTable("Calibration", ("what", "value"), tuple(rows))
