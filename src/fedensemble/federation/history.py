"""What training records about each round: losses, bytes and test metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.types import RoundReport

Record = dict[str, Any]


def describe(report: RoundReport) -> Record:
    """The record of a round, a line of metrics.jsonl.

    It has no times other than simulated ones, so that equal runs write equal files.
    """
    record = {
        "round": report.round,
        "age": report.age,
        "loss": report.loss,
        "visits": len(report.plan.client),
        "modes_trained": len(report.trained),
        "bytes_up": report.bytes_up,
        "bytes_down": report.bytes_down,
    }
    if report.turnout is not None:
        selected, late, dropped, away, seconds, clock, _ = report.turnout
        record |= {
            "asked": selected,
            "late": late,
            "dropped": dropped,
            "away": away,
            "round_seconds": seconds,
            "clock": clock,
        }
    return record


class History:
    """The records of a federation's rounds, oldest first.

    Attributes:
        records: one per round.
        test_every: rounds between tests, if `train` was told; None otherwise.
    """

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.test_every: int | None = None

    def __repr__(self) -> str:
        tests = sum("test" in record for record in self.records)
        return f"History({len(self.records)} records, {tests} with a test)"

    def add(self, report: RoundReport) -> None:
        """Adds the record of a round."""
        self.records.append(describe(report))

    def add_test(self, round: int, metrics: Mapping[str, Any]) -> None:
        """Adds test metrics to the record of the last round; ignores those of another round."""
        if self.tested_at(round) is not None:
            self.records[-1] |= metrics

    def tested_at(self, round: int) -> Record | None:
        """The record of the last round if it is this one; None otherwise."""
        return self.records[-1] if self.records and self.records[-1]["round"] == round else None
