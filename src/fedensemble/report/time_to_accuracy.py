"""Simulated time until a run reached an accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

HOUR = 3600.0

Records = Sequence[Mapping[str, Any]]


def hours(seconds: float) -> str:
    """Seconds as a text in hours.

    >>> hours(7200), hours(5.6436)
    ('2.00', '0.00157')
    """
    return f"{seconds / HOUR:.2f}" if seconds >= HOUR else f"{seconds / HOUR:.3g}"


def has_clock(records: Records) -> bool:
    """Whether the records of a run have a simulated clock."""
    return bool(records) and "clock" in records[-1]


def reached(records: Records, accuracy: float) -> Mapping[str, Any] | None:
    """The record of the first test with at least this accuracy, or None.

    >>> records = [{"round": at, "test": {"accuracy": at / 10}} for at in (4, 6)]
    >>> reached(records, 0.5)["round"]
    6
    """
    return next((r for r in records if r.get("test", {}).get("accuracy", 0.0) >= accuracy), None)


def common_target(curves: Sequence[Records]) -> float | None:
    """The highest accuracy in integer percent that all runs reached, as a fraction, or None.

    It is None if a run has no clock or no accuracy of at least one percent.
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
    """Simulated seconds until each run reached the accuracy; runs that never did are left out."""
    firsts = [reached(records, accuracy) for records in curves]
    return [record["clock"] for record in firsts if record is not None]
