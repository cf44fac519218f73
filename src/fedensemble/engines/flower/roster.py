"""The clients of a fleet, with a stable identity each.

Flower gives a node a new id with every registration. Strata, random keys and client state belong to
a client, so they follow its identity instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from flwr.serverapp import Grid
from torch import Tensor

from ...errors import InputError
from .enrolment import PROGRESS_SECONDS, EnrolmentProblems, explain_missing
from .exchange import Clock, Exchange
from .messages import UnreadableError, build_query_message, read_metric, read_problem

IDENTITIES = ("auto", "name", "key", "partition")
Log = Callable[[str], None]


@dataclass(frozen=True)
class Member:
    """A client as it was enrolled.

    Args:
        name: display name; unique among the members.
        examples: number of examples.
        identity: what the client is recognized by: the fingerprint of its public key, or its name.
    """

    name: str
    examples: int
    identity: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "identity", self.identity or self.name)

    def to_record(self) -> list[Any]:
        """Returns the entry for the roster file."""
        return [self.name, self.examples, self.identity]

    @classmethod
    def from_record(cls, record: list[Any], identity: str) -> Member:
        """Returns a member from its entry in the roster file; version 0.1 had no third entry."""
        name, examples, *member_identity = record
        # In version 0.1 with identity "key", the name was the whole key in hexadecimal digits.
        if not member_identity and identity == "key":
            return cls(name, examples, fingerprint(bytes.fromhex(name)))
        return cls(name, examples, *member_identity)


@dataclass
class _PendingQueries:
    """Queries that were sent together, until they expire."""

    exchange: Exchange
    deadline: float

    def find_silent_nodes(self) -> set[int]:
        """Returns the ids of nodes that have not replied yet."""
        return {
            self.exchange.messages[index].metadata.dst_node_id
            for index in self.exchange.waiting.values()
        }


@dataclass
class Roster:
    """The clients of a training, client i being `members[i]`, and the nodes where they run.

    Args:
        identity: what identifies a client: its public "key", the "name" with which its node was
            registered, or the "partition" number that it claims in its reply (which proves nothing:
            for simulation and closed networks). "auto" means keys if any node was registered with a
            name, which only an operator can do, and partitions otherwise.
        max_examples: largest number of examples that a client may claim.
        poll: seconds between two polls for replies.
        log: called with each line for the operator.
        frozen: fingerprint of the parameters that are not trained, which clients must have built
            as well; None if there are none.
        seen: member of each node that has replied, by node id; None if its reply was not valid.
    """

    grid: Grid
    identity: str = "auto"
    members: tuple[Member, ...] = ()
    max_examples: int = 10_000_000
    clock: Clock = field(default_factory=Clock)
    poll: float = 1.0
    log: Log = print
    frozen: Tensor | None = None
    seen: dict[int, Member | None] = field(default_factory=dict)
    _pending: list[_PendingQueries] = field(default_factory=list)
    _holders: dict[str, int] = field(default_factory=dict)  # identity -> node that is used for it
    _problems: EnrolmentProblems = field(default_factory=EnrolmentProblems)
    # nodes whose rejection, as a second node of a client, was logged
    _rejected: set[int] = field(default_factory=set)
    # whether enrolment, or the first lookup after a restart of the server, is over
    _settled: bool = False

    def __post_init__(self) -> None:
        if self.identity not in IDENTITIES:
            raise InputError(
                f"The run's setting `identity` is one of {', '.join(IDENTITIES)}; "
                f"got '{self.identity}'."
            )

    def __len__(self) -> int:
        """Returns the number of clients, N."""
        return len(self.members)

    def enrol(self, count: int, timeout: float) -> None:
        """Waits until `count` clients have replied; all that have by then become the members."""
        deadline = self.clock.now() + timeout
        progress = self.clock.now() + PROGRESS_SECONDS
        while True:
            online = self._find_online()
            # "auto" is settled when all are there. Otherwise ask at once: that spreads the load.
            if len(online) >= count or self.identity != "auto":
                self._settle_identity(online)
                self.query_new_nodes(online, max(deadline - self.clock.now(), self.poll))
            members = [
                member
                for node in self._assign(online).values()
                if (member := self.seen[node]) is not None
            ]
            if len(members) >= count:
                by_name = sorted(members, key=lambda member: natural_sort_key(member.name))
                self.members, self._settled = tuple(by_name), True
                return
            if self.clock.now() >= deadline:
                names = sorted((member.name for member in members), key=natural_sort_key)
                problems = self._problems.among(online)
                slow = [self._label(node, online) for node in self._find_silent(online)]
                raise InputError(
                    explain_missing(count, timeout, names, problems, slow, len(online))
                )
            if self.clock.now() >= progress:
                progress = self.clock.now() + PROGRESS_SECONDS
                silent, unable = self._find_silent(online), self._problems.among(online)
                self.log(
                    f"{len(members)} of {count} clients are enrolled. Of {len(online)} connected "
                    f"SuperNodes {len(silent)} have not replied yet, {len(unable)} cannot enrol."
                )
            self.clock.sleep(self.poll)

    def _find_silent(self, online: dict[int, Any]) -> list[int]:
        """Returns the online nodes that were asked and have not replied."""
        waiting = {node for queries in self._pending for node in queries.find_silent_nodes()}
        known = {*self.seen, *self._problems.reasons}
        return [node for node in online if node in waiting and node not in known]

    def _label(self, node: int, online: dict[int, Any]) -> str:
        """Returns the name with which a node was registered, or else its number."""
        name = str(online[node].name) if node in online else ""
        return name or f"Node {node}"

    def find_nodes(self, timeout: float) -> dict[int, int]:
        """Returns the node id of each client that is online, by client index.

        After a restart of the server, the first call waits for nodes to reply with their identity.
        """
        online, deadline = self._find_online(), self.clock.now() + timeout
        self.query_new_nodes(online, timeout)
        while (
            not self._settled
            and any(queries.find_silent_nodes() for queries in self._pending)
            and self.clock.now() < deadline
        ):
            self.clock.sleep(self.poll)
            self.query_new_nodes(online, timeout)
        self._settled = True
        client_index = {member.identity: index for index, member in enumerate(self.members)}
        return {
            client_index[identity]: node
            for identity, node in self._assign(online).items()
            if identity in client_index
        }

    def _settle_identity(self, online: dict[int, Any]) -> None:
        """Replaces "auto" by "key" if any node has a registered name, else by "partition".

        One named node suffices: a node without a name must not make the server trust self-declared
        partition numbers.
        """
        if self.identity != "auto":
            return
        any_named = any(node.name for node in online.values())
        self.identity = "key" if any_named else "partition"
        self.log(
            "Clients are identified by their public keys (identity = auto, and nodes are "
            "registered with names)."
            if any_named
            else "Clients are identified by the partition-id that they claim, which proves nothing "
            "(identity = auto, and no node is registered with a name). Outside a closed network "
            'set identity = "key".'
        )

    def _assign(self, online: dict[int, Any]) -> dict[str, int]:
        """Returns one node id per identity.

        It is the node that already holds the identity if that is online, else the first registered.
        """
        identity_by_name = {member.name: member.identity for member in self.members}
        nodes: dict[str, int] = {}
        # Holders come first: False sorts before True, and `sorted` keeps the order of registration.
        for node in sorted(
            online, key=lambda node: self._holders.get(self._identity_of(node), node) != node
        ):
            member = self.seen.get(node)
            if member is None:
                continue
            if member.identity in nodes:
                self._reject_second(
                    node, f"node {nodes[member.identity]} is '{member.name}' already"
                )
            elif identity_by_name.setdefault(member.name, member.identity) != member.identity:
                self._reject_second(node, f"another key is enrolled under its name '{member.name}'")
            else:
                nodes[member.identity] = node
        self._holders |= nodes
        return nodes

    def _identity_of(self, node: int) -> str:
        member = self.seen.get(node)
        return "" if member is None else member.identity

    def _reject_second(self, node: int, reason: str) -> None:
        """Logs the rejection of a client's second node, once per node."""
        if node not in self._rejected:
            self._rejected.add(node)
            self.log(f"Node {node} is rejected: {reason}.")

    def query_new_nodes(self, online: dict[int, Any], timeout: float) -> None:
        """Asks new nodes for their identity and number of examples, and reads arrived replies."""
        now = self.clock.now()
        self._pending = [
            queries
            for queries in self._pending
            if queries.exchange.waiting and now < queries.deadline
        ]
        # The SuperLink has verified names and keys, so members with these need no query.
        if self.identity in ("name", "key"):
            member_by_identity = {member.identity: member for member in self.members}
            proven = {
                node: self._proven_identity(info)
                for node, info in online.items()
                if node not in self.seen
            }
            self.seen |= {
                node: member_by_identity[identity]
                for node, identity in proven.items()
                if identity in member_by_identity
            }
        queried = {node for queries in self._pending for node in queries.find_silent_nodes()}
        new_nodes = [
            node
            for node in online
            if node not in self.seen and node not in queried and self._problems.may_ask(node, now)
        ]
        if new_nodes:
            messages = [build_query_message(node, timeout, self.frozen) for node in new_nodes]
            self._pending.append(_PendingQueries(Exchange(self.grid, messages), now + timeout))
        for queries in self._pending:
            for index, message in queries.exchange.poll():
                if index is None:
                    continue
                node = queries.exchange.messages[index].metadata.dst_node_id
                # A node that cannot enrol is not added to `seen`, so that it is asked again.
                if message.has_error():
                    reason = message.error.reason or f"error {message.error.code}"
                    self._add_problem(node, f"{self._label(node, online)} does not reply: {reason}")
                elif node in online and (problem := read_problem(message.content)) is not None:
                    label = self._problem_label(message, node, online)
                    self._add_problem(node, f"{label} {problem}")
                elif node in online:
                    self._problems.remove(node)
                    self.seen[node] = self._read_member(message, online[node])

    def _problem_label(self, message: Any, node: int, online: dict[int, Any]) -> str:
        """Returns what to call a node that cannot enrol: its partition if these are the names."""
        if self.identity == "partition":
            try:
                return f"partition-{read_metric(message.content, 'partition', int)}"
            except UnreadableError:
                pass
        return self._label(node, online)

    def _add_problem(self, node: int, reason: str) -> None:
        """Notes why a node cannot enrol, and logs it once per reason."""
        if self._problems.add(node, reason, self.clock.now()):
            self.log(f"{self._problems.reasons[node]}.")

    def _find_online(self) -> dict[int, Any]:
        """Returns the online nodes by id, in the order of registration."""
        nodes = sorted(self.grid.get_nodes(), key=lambda node: (node.registered_at, node.node_id))
        return {node.node_id: node for node in nodes}

    def _read_member(self, message: Any, node: Any) -> Member | None:
        """Returns the member that a reply describes; logs why and returns None if it is invalid."""
        try:
            identity = self._read_identity(message, node)
            examples = read_metric(message.content, "examples", int)
            if not 1 <= examples <= self.max_examples:
                raise UnreadableError(
                    f"{examples} examples, where 1 to {self.max_examples} are plausible"
                )
            for member in self.members:
                if member.identity == identity:
                    if member.examples != examples:
                        raise UnreadableError(
                            f"'{member.name}' has {examples} examples, "
                            f"and was enrolled with {member.examples}"
                        )
                    return member
            return Member(self._display_name(identity, node), examples, identity)
        except UnreadableError as problem:
            label = str(node.name) or f"Node {node.node_id}"
            self._add_problem(node.node_id, f"{label} is not enrolled: {problem}")
            return None

    def _read_identity(self, message: Any, node: Any) -> str:
        if self.identity in ("name", "key"):
            identity = self._proven_identity(node)
            if not identity:
                raise UnreadableError(
                    "its registration has no name (flwr supernode register --name)"
                    if self.identity == "name"
                    else "Flower knows no public key of it"
                )
            return identity
        partition = read_metric(message.content, "partition", int)
        if partition < 0:
            raise UnreadableError(
                "it gives no partition-id; start it with --node-config 'partition-id=0'"
            )
        return f"partition-{partition}"

    def _proven_identity(self, node: Any) -> str:
        """Returns the name or key fingerprint that the SuperLink has verified, or ""."""
        if self.identity == "name":
            return str(node.name)
        return fingerprint(bytes(node.public_key)) if node.public_key else ""

    def _display_name(self, identity: str, node: Any) -> str:
        if self.identity != "key":
            return identity
        return str(node.name) or f"key-{identity[:16]}"


def fingerprint(key: bytes) -> str:
    """Returns the SHA-256 of a public key as Flower stores it."""
    return sha256(key).hexdigest()


def natural_sort_key(name: str) -> list[Any]:
    """Returns a sort key that compares digits in names as numbers.

    >>> sorted(["client-10", "client-9"], key=natural_sort_key)
    ['client-9', 'client-10']
    """
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
