"""Who the clients are: a stable name for each, so that strata and memory survive a node's new number."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flwr.serverapp import Grid

from ...errors import InputError
from .post import Clock, Exchange
from .wire import UnreadableError, number, query_message

IDENTITIES = ("auto", "name", "key", "partition")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Member:
    """A client as it was enrolled."""

    name: str
    examples: int


@dataclass
class _Asked:
    """Queries under way."""

    exchange: Exchange
    until: float

    def nodes(self) -> set[int]:
        """Those that have not answered yet."""
        return {self.exchange.messages[index].metadata.dst_node_id for index in self.exchange.waiting.values()}


@dataclass
class Roster:
    """The clients of a training, client i being `members[i]`, and the nodes they are reached at.

    Args:
        identity: what makes a client the same client: the "name" its node was registered with, its public "key", or the
            "partition" number it gives when asked (which proves nothing: for simulation and closed networks). "auto"
            settles for names, where all nodes have one when clients are enrolled, or else partitions.
    """

    grid: Grid
    identity: str = "auto"
    members: tuple[Member, ...] = ()
    most: int = 10_000_000  # examples that a client may say it has
    clock: Clock = field(default_factory=Clock)
    poll: float = 1.0
    say: Say = print
    met: dict[int, Member | None] = field(default_factory=dict)  # by node number; None if the answer was no good
    _asked: list[_Asked] = field(default_factory=list)
    _settled: bool = False

    def __post_init__(self) -> None:
        if self.identity not in IDENTITIES:
            raise InputError(f"The run's setting `identity` is one of {', '.join(IDENTITIES)}; got '{self.identity}'.")

    def __len__(self) -> int:
        """Number of clients, N."""
        return len(self.members)

    def enrol(self, count: int, timeout: float) -> None:
        """Waits until `count` clients have said who they are; those there by then are the clients of the training."""
        deadline = self.clock.now() + timeout
        while True:
            online = self._online()
            if len(online) >= count:
                if self.identity == "auto":
                    self.identity = "name" if all(node.name for node in online.values()) else "partition"
                self.meet(online, max(deadline - self.clock.now(), self.poll))
            found = {member.name: member for member in self.met.values() if member is not None}
            if len(found) >= count:
                self.members, self._settled = tuple(found[name] for name in sorted(found, key=natural)), True
                return
            if self.clock.now() >= deadline:
                listed = ", ".join(sorted(found, key=natural)) or "nobody"
                raise InputError(
                    f"Only {len(found)} of {count} clients were there after {timeout:g} s: {listed}. Start more "
                    "SuperNodes, or lower the run's setting `clients`."
                )
            self.clock.sleep(self.poll)

    def nodes(self, timeout: float) -> dict[int, int]:
        """The node of every client that is there now; a server that has just started waits for them to say so."""
        online, deadline = self._online(), self.clock.now() + timeout
        self.meet(online, timeout)
        while not self._settled and any(asked.nodes() for asked in self._asked) and self.clock.now() < deadline:
            self.clock.sleep(self.poll)
            self.meet(online, timeout)
        self._settled = True
        place = {member: index for index, member in enumerate(self.members)}
        found: dict[int, int] = {}
        for node in online:
            member = self.met.get(node)
            if member in place:
                found[place[member]] = node  # the newest node of that name
        return found

    def meet(self, online: dict[int, Any], timeout: float) -> None:
        """Asks nodes that were never met how many examples they have and who they are, and hears what came in."""
        now = self.clock.now()
        self._asked = [asked for asked in self._asked if asked.exchange.waiting and now < asked.until]
        if self.identity in ("name", "key"):  # who is known by these need not be asked again
            known = {member.name: member for member in self.members}
            names = {node: self._proven(info) for node, info in online.items() if node not in self.met}
            self.met |= {node: known[name] for node, name in names.items() if name in known}
        pending = {node for asked in self._asked for node in asked.nodes()}
        new = [node for node in online if node not in self.met and node not in pending]
        if new:
            self._asked.append(
                _Asked(Exchange(self.grid, [query_message(node, timeout) for node in new]), now + timeout)
            )
        for asked in self._asked:
            for index, message in asked.exchange.look():
                if index is None:
                    continue
                node = asked.exchange.messages[index].metadata.dst_node_id
                if message.has_error():  # it may do better the next time
                    self.say(f"Node {node} does not say who it is: {message.error.reason}.")
                elif node in online:
                    self.met[node] = self._read(message, online[node])

    def _online(self) -> dict[int, Any]:
        """Nodes by number, in the order of registration."""
        nodes = sorted(self.grid.get_nodes(), key=lambda node: (node.registered_at, node.node_id))
        return {node.node_id: node for node in nodes}

    def _read(self, message: Any, node: Any) -> Member | None:
        try:
            name, examples = self._name(message, node), number(message.content, "examples", int)
            if not 1 <= examples <= self.most:
                raise UnreadableError(f"{examples} examples, where 1 to {self.most} are plausible")
            known = [member for member in self.members if member.name == name]
            if known and known[0].examples != examples:
                raise UnreadableError(f"'{name}' has {examples} examples, and was enrolled with {known[0].examples}")
            return Member(name, examples)
        except UnreadableError as problem:
            self.say(f"Node {node.node_id} is not enrolled: {problem}.")
            return None

    def _name(self, message: Any, node: Any) -> str:
        if self.identity in ("name", "key"):
            if not self._proven(node):
                raise UnreadableError("its registration has no name (flwr supernode register --name)")
            return self._proven(node)
        partition = number(message.content, "partition", int)
        if partition < 0:
            raise UnreadableError("it gives no partition-id; start it with --node-config 'partition-id=0'")
        return f"partition-{partition}"

    def _proven(self, node: Any) -> str:
        """What the SuperLink knows of a node, which had to prove it."""
        return str(node.name) if self.identity == "name" else bytes(node.public_key).hex()


def natural(name: str) -> list[Any]:
    """A key that sorts numbers in names as numbers.

    >>> sorted(["client-10", "client-9"], key=natural)
    ['client-9', 'client-10']
    """
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
