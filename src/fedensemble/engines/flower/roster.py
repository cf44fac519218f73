"""Who the clients are: a stable identity for each, so that strata and memory survive a node's new
number.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from flwr.serverapp import Grid

from ...errors import InputError
from ...text import shorten
from .exchange import Clock, Exchange
from .messages import UnreadableError, number, query_message

IDENTITIES = ("auto", "name", "key", "partition")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Member:
    """A client as it was enrolled.

    Args:
        name: for people; no two members share one.
        examples: how many it has.
        identity: what it is recognised by: the fingerprint of its public key, or its name.
    """

    name: str
    examples: int
    identity: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "identity", self.identity or self.name)

    def record(self) -> list[Any]:
        """For the roster's file."""
        return [self.name, self.examples, self.identity]

    @classmethod
    def from_record(cls, record: list[Any], identity: str) -> Member:
        """A member from the roster's file; without a third entry it is of version 0.1."""
        name, examples, *known = record
        if not known and identity == "key":  # the name was the whole key, in hexadecimal digits
            return cls(name, examples, fingerprint(bytes.fromhex(name)))
        return cls(name, examples, *known)


@dataclass
class _Asked:
    """Queries under way."""

    exchange: Exchange
    until: float

    def nodes(self) -> set[int]:
        """Those that have not answered yet."""
        return {
            self.exchange.messages[index].metadata.dst_node_id
            for index in self.exchange.waiting.values()
        }


@dataclass
class Roster:
    """The clients of a training, client i being `members[i]`, and the nodes they are reached at.

    Args:
        identity: what makes a client the same client: its public "key", the "name" its node was
            registered with, or the "partition" number it gives when asked (which proves nothing:
            for simulation and closed networks). "auto" means keys where any node was registered
            with a name, which takes an operator, or else partitions.
    """

    grid: Grid
    identity: str = "auto"
    members: tuple[Member, ...] = ()
    most: int = 10_000_000  # examples that a client may say it has
    clock: Clock = field(default_factory=Clock)
    poll: float = 1.0
    say: Say = print
    # by node number; None if the answer was no good
    met: dict[int, Member | None] = field(default_factory=dict)
    _asked: list[_Asked] = field(default_factory=list)
    _holders: dict[str, int] = field(default_factory=dict)  # the node that is asked, by identity
    # why a node could not answer, as it was logged
    _failures: dict[int, str] = field(default_factory=dict)
    # nodes that were refused as somebody's second, and logged
    _refused: set[int] = field(default_factory=set)
    _settled: bool = False

    def __post_init__(self) -> None:
        if self.identity not in IDENTITIES:
            raise InputError(
                f"The run's setting `identity` is one of {', '.join(IDENTITIES)}; got '{self.identity}'."
            )

    def __len__(self) -> int:
        """Number of clients, N."""
        return len(self.members)

    def enrol(self, count: int, timeout: float) -> None:
        """Waits until `count` clients have said who they are; those there by then are the clients
        of the training.
        """
        deadline = self.clock.now() + timeout
        while True:
            online = self._online()
            if len(online) >= count:
                self._settle_identity(online)
                self.meet(online, max(deadline - self.clock.now(), self.poll))
            found = [
                member
                for node in self._assign(online).values()
                if (member := self.met[node]) is not None
            ]
            if len(found) >= count:
                self.members, self._settled = (
                    tuple(sorted(found, key=lambda member: natural(member.name))),
                    True,
                )
                return
            if self.clock.now() >= deadline:
                listed = (
                    ", ".join(sorted((member.name for member in found), key=natural)) or "nobody"
                )
                raise InputError(
                    f"Only {len(found)} of {count} clients were there after {timeout:g} s: {listed}. Start more "
                    "SuperNodes, or lower the run's setting `clients`."
                )
            self.clock.sleep(self.poll)

    def nodes(self, timeout: float) -> dict[int, int]:
        """The node of every client that is there now; a server that has just started waits for them
        to say so.
        """
        online, deadline = self._online(), self.clock.now() + timeout
        self.meet(online, timeout)
        while (
            not self._settled
            and any(asked.nodes() for asked in self._asked)
            and self.clock.now() < deadline
        ):
            self.clock.sleep(self.poll)
            self.meet(online, timeout)
        self._settled = True
        place = {member.identity: index for index, member in enumerate(self.members)}
        return {
            place[identity]: node
            for identity, node in self._assign(online).items()
            if identity in place
        }

    def _settle_identity(self, online: dict[int, Any]) -> None:
        """What "auto" means on this fleet; one node without a name does not make it trust
        self-declared numbers.
        """
        if self.identity != "auto":
            return
        named = any(node.name for node in online.values())
        self.identity = "key" if named else "partition"
        self.say(
            "Clients are identified by their public keys (identity = auto, and nodes are registered with names)."
            if named
            else "Clients are identified by the partition-id that they give themselves, which proves nothing (identity "
            '= auto, and no node is registered with a name). Outside a closed network set identity = "key".'
        )

    def _assign(self, online: dict[int, Any]) -> dict[str, int]:
        """One node for each identity: the one that holds it while it is there, else the first to be
        registered.
        """
        known = {member.name: member.identity for member in self.members}
        nodes: dict[str, int] = {}
        for node in sorted(
            online, key=lambda node: self._holders.get(self._identity_of(node), node) != node
        ):
            member = self.met.get(node)
            if member is None:
                continue
            if member.identity in nodes:
                self._refuse_second(
                    node, f"node {nodes[member.identity]} is '{member.name}' already"
                )
            elif known.setdefault(member.name, member.identity) != member.identity:
                self._refuse_second(node, f"another key is enrolled under its name '{member.name}'")
            else:
                nodes[member.identity] = node
        self._holders |= nodes
        return nodes

    def _identity_of(self, node: int) -> str:
        member = self.met.get(node)
        return "" if member is None else member.identity

    def _refuse_second(self, node: int, reason: str) -> None:
        if node not in self._refused:
            self._refused.add(node)
            self.say(f"Node {node} is refused: {reason}.")

    def meet(self, online: dict[int, Any], timeout: float) -> None:
        """Asks nodes that were never met how many examples they have and who they are, and hears
        what came in.
        """
        now = self.clock.now()
        self._asked = [
            asked for asked in self._asked if asked.exchange.waiting and now < asked.until
        ]
        if self.identity in ("name", "key"):  # who is known by these need not be asked again
            known = {member.identity: member for member in self.members}
            proven = {
                node: self._proven(info) for node, info in online.items() if node not in self.met
            }
            self.met |= {
                node: known[identity] for node, identity in proven.items() if identity in known
            }
        pending = {node for asked in self._asked for node in asked.nodes()}
        new = [node for node in online if node not in self.met and node not in pending]
        if new:
            self._asked.append(
                _Asked(
                    Exchange(self.grid, [query_message(node, timeout) for node in new]),
                    now + timeout,
                )
            )
        for asked in self._asked:
            for index, message in asked.exchange.look():
                if index is None:
                    continue
                node = asked.exchange.messages[index].metadata.dst_node_id
                if message.has_error():  # it may do better the next time
                    self._log_failure(
                        node, shorten(message.error.reason or f"error {message.error.code}")
                    )
                elif node in online:
                    self.met[node] = self._read(message, online[node])

    def _log_failure(self, node: int, reason: str) -> None:
        """Once for each reason: it is asked again and again, and a log must not grow with that."""
        if self._failures.get(node) != reason:
            self._failures[node] = reason
            self.say(f"Node {node} does not say who it is: {reason}.")

    def _online(self) -> dict[int, Any]:
        """Nodes by number, in the order of registration."""
        nodes = sorted(self.grid.get_nodes(), key=lambda node: (node.registered_at, node.node_id))
        return {node.node_id: node for node in nodes}

    def _read(self, message: Any, node: Any) -> Member | None:
        try:
            identity, examples = (
                self._identify(message, node),
                number(message.content, "examples", int),
            )
            if not 1 <= examples <= self.most:
                raise UnreadableError(f"{examples} examples, where 1 to {self.most} are plausible")
            known = [member for member in self.members if member.identity == identity]
            if known and known[0].examples != examples:
                raise UnreadableError(
                    f"'{known[0].name}' has {examples} examples, and was enrolled with {known[0].examples}"
                )
            return (
                known[0]
                if known
                else Member(self._display_name(identity, node), examples, identity)
            )
        except UnreadableError as problem:
            self.say(f"Node {node.node_id} is not enrolled: {problem}.")
            return None

    def _identify(self, message: Any, node: Any) -> str:
        if self.identity in ("name", "key"):
            if not self._proven(node):
                raise UnreadableError(
                    "its registration has no name (flwr supernode register --name)"
                    if self.identity == "name"
                    else "Flower knows no public key of it"
                )
            return self._proven(node)
        partition = number(message.content, "partition", int)
        if partition < 0:
            raise UnreadableError(
                "it gives no partition-id; start it with --node-config 'partition-id=0'"
            )
        return f"partition-{partition}"

    def _proven(self, node: Any) -> str:
        """What the SuperLink knows of a node, which had to prove it."""
        if self.identity == "name":
            return str(node.name)
        return fingerprint(bytes(node.public_key)) if node.public_key else ""

    def _display_name(self, identity: str, node: Any) -> str:
        if self.identity != "key":
            return identity
        return str(node.name) or f"key-{identity[:16]}"


def fingerprint(key: bytes) -> str:
    """SHA-256 of a public key as Flower stores it."""
    return sha256(key).hexdigest()


def natural(name: str) -> list[Any]:
    """A key that sorts numbers in names as numbers.

    >>> sorted(["client-10", "client-9"], key=natural)
    ['client-9', 'client-10']
    """
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
