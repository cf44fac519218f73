"""Long curves made readable: each point is the mean of several neighboring tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")
MAX_POINTS = 60  # points of a curve; more points of noisy tests would hide one another
MAX_LOSS_POINTS = 250  # points of the training loss, which is a single line


def grouped(items: Sequence[Item], max_points: int = MAX_POINTS) -> list[Sequence[Item]]:
    """At most `max_points` groups of neighbors; all groups but the first have the same size.

    >>> grouped([1, 2, 3, 4, 5], 3)
    [[1], [2, 3], [4, 5]]
    """
    size = group_size(len(items), max_points)
    ends = range(len(items) % size or size, len(items) + 1, size)
    return [items[max(0, end - size) : end] for end in ends]


def group_size(count: int, max_points: int = MAX_POINTS) -> int:
    """The number of neighbors that make one point."""
    return max(1, -(-count // max_points))


def averaged(values: Sequence[float], max_points: int = MAX_POINTS) -> list[float]:
    """The mean of each group."""
    return [sum(group) / len(group) for group in grouped(values, max_points)]


def caption(count: int, max_points: int = MAX_POINTS, what: str = "tests") -> str:
    """A sentence on how points were averaged; empty if each point is one test.

    >>> caption(400), caption(60)
    ('Each point is the mean of the 7 tests up to it.', '')
    """
    size = group_size(count, max_points)
    return f"Each point is the mean of the {size} {what} up to it." if size > 1 else ""
