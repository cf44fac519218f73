"""Clients that cannot enrol: why, when to ask them again, and what to tell the operator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...text import shorten

PROGRESS_SECONDS = 30.0  # between two lines about an enrolment that takes long
# A node that cannot enrol is asked again after these seconds, twice as many each time. A query
# starts a process on the node's machine, which may be the reason why the machine is slow.
FIRST_RETRY, LONGEST_RETRY = 5.0, 60.0
_MAX_NAMED = 5  # clients that a message names at most


class EnrolmentProblems:
    """Last problem of each node that cannot enrol, by node id."""

    def __init__(self) -> None:
        self.reasons: dict[int, str] = {}
        self._retries: dict[int, tuple[float, float]] = {}  # time of the next query, and its delay

    def add(self, node: int, reason: str, now: float) -> bool:
        """Notes why a node cannot enrol; returns whether that is news.

        Args:
            reason: a sentence without its full stop; it may hold text of the client.
            now: time, in seconds.
        """
        _, delay = self._retries.get(node, (now, FIRST_RETRY / 2))
        delay = min(2 * delay, LONGEST_RETRY)
        self._retries[node] = (now + delay, delay)
        reason = shorten(reason).rstrip(".")
        known, self.reasons[node] = self.reasons.get(node), reason
        return known != reason

    def remove(self, node: int) -> None:
        """Forgets the problem of a node that has enrolled."""
        self.reasons.pop(node, None)
        self._retries.pop(node, None)

    def may_ask(self, node: int, now: float) -> bool:
        """Returns whether it is time to ask a node, again or for the first time."""
        return now >= self._retries.get(node, (now, 0.0))[0]

    def among(self, nodes: Iterable[int]) -> list[str]:
        """Returns the problems of the given nodes."""
        return [self.reasons[node] for node in nodes if node in self.reasons]


def explain_missing(
    count: int,
    timeout: float,
    enrolled: Sequence[str],
    unable: Sequence[str],
    silent: Sequence[str],
    connected: int,
) -> str:
    """Returns which clients are not enrolled after the timeout, why, and what to do.

    Args:
        count: number of clients that were awaited.
        timeout: seconds that they had.
        enrolled: names of the clients that are enrolled.
        unable: problems of connected nodes.
        silent: names of connected nodes that were asked and have not replied.
        connected: number of connected nodes.
    """
    names = f": {join_some(enrolled)}" if enrolled else ""
    texts = [f"{len(enrolled)} of {count} clients are enrolled after {timeout:g} s{names}."]
    if unable:
        texts.append(
            f"Connected, but unable to enrol: {len(unable)} ({join_some(unable, '; ')}). Repair "
            "these clients and repeat flwr run, or lower the run's setting `clients`."
        )
    if silent:
        texts.append(
            f"Connected, but without a reply so far: {len(silent)} ({join_some(silent)}). Each "
            "message starts a Python process that imports PyTorch, so a machine with n cores works "
            "on n messages at a time. Raise the run's setting `enrol-timeout`, or run fewer "
            "SuperNodes per machine."
        )
    if connected < count:
        texts.append(
            f"Not connected: {count - connected}. Start their SuperNodes, or lower the run's "
            "setting `clients`."
        )
    return " ".join(texts)


def join_some(texts: Sequence[str], separator: str = ", ") -> str:
    """Returns the first texts, and how many more there are.

    >>> join_some([str(n) for n in range(7)])
    '0, 1, 2, 3, 4 and 2 more'
    """
    more = f" and {len(texts) - _MAX_NAMED} more" if len(texts) > _MAX_NAMED else ""
    return separator.join(texts[:_MAX_NAMED]) + more
