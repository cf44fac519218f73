"""Time on the simulated clock: when a run reached an accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

HOUR = 3600.0

Records = Sequence[Mapping[str, Any]]


def hours(seconds: float) -> str:
    """Seconds as hours, as people read them.

    >>> hours(7200), hours(5.6436)
    ('2.00', '0.00157')
    """
    return f"{seconds / HOUR:.2f}" if seconds >= HOUR else f"{seconds / HOUR:.3g}"


def has_clock(records: Records) -> bool:
    """Whether the run had a simulated clock."""
    return bool(records) and "clock" in records[-1]


def reached(records: Records, accuracy: float) -> Mapping[str, Any] | None:
    """The record of the first test with this accuracy, or None.

    >>> reached([{"round": 5, "test": {"accuracy": 0.4}}, {"round": 10, "test": {"accuracy": 0.6}}], 0.5)["round"]
    10
    """
    return next((r for r in records if r.get("test", {}).get("accuracy", 0.0) >= accuracy), None)


def common_target(curves: Sequence[Records]) -> float | None:
    """The highest whole percentage that all runs reached; None if a run has no clock or no accuracy
    above 0.
    """
    if not all(has_clock(records) for records in curves):
        return None
    best = [
        max((r["test"].get("accuracy", 0.0) for r in records if "test" in r), default=0.0)
        for records in curves
    ]
    return max(
        (percent / 100 for percent in range(1, 101) if percent / 100 <= min(best)), default=None
    )


def seconds_to(curves: Sequence[Records], accuracy: float) -> list[float]:
    """Simulated seconds until each run had this accuracy; runs that never had it are left out."""
    found = [reached(records, accuracy) for records in curves]
    return [record["clock"] for record in found if record is not None]
