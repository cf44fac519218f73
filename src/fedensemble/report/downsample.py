"""Long curves made readable: each point is the mean of several neighboring tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")
MOST = 60  # points of a curve; more points of noisy tests would hide one another
MOST_ROUNDS = 250  # points of the training loss, which is a single line


def grouped(items: Sequence[Item], most: int = MOST) -> list[Sequence[Item]]:
    """At most `most` groups of neighbors; all groups but the first have the same size.

    >>> grouped([1, 2, 3, 4, 5], 3)
    [[1], [2, 3], [4, 5]]
    """
    size = group_size(len(items), most)
    ends = range(len(items) % size or size, len(items) + 1, size)
    return [items[max(0, end - size) : end] for end in ends]


def group_size(count: int, most: int = MOST) -> int:
    """The number of neighbors that make one point."""
    return max(1, -(-count // most))


def averaged(values: Sequence[float], most: int = MOST) -> list[float]:
    """The mean of each group."""
    return [sum(group) / len(group) for group in grouped(values, most)]


def caption(count: int, most: int = MOST, what: str = "tests") -> str:
    """A sentence on how points were averaged; empty if each point is one test.

    >>> caption(400), caption(60)
    ('Each point is the mean of the 7 tests up to it.', '')
    """
    size = group_size(count, most)
    return f"Each point is the mean of the {size} {what} up to it." if size > 1 else ""
