"""A grid without a network: clients answer in this process, on a clock of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedensemble.core.round import run_round
from fedensemble.core.types import EnsembleState
from fedensemble.deploy.client_calibration import answer_query
from fedensemble.engines.flower.client import LocalClient
from fedensemble.engines.flower.engine import FlowerEngine
from fedensemble.engines.flower.exchange import Clock
from fedensemble.engines.flower.roster import Roster

# a real ServerApp is told at its start
TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1

FIRST_NODE = 100  # node numbers are not client numbers


class Time(Clock):
    """A clock that only sleep moves."""

    def __init__(self) -> None:
        self.time = 0.0
        super().__init__(now=lambda: self.time, sleep=self._sleep)

    def _sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.time += seconds


@dataclass
class Node:
    """A client's node: what it answers, and after how long."""

    client: LocalClient
    partition: int
    name: str = ""
    delay: float = 0.5
    online: bool = True
    # what it makes of its answer
    bend: Callable[[Message, Message], list[Message]] = lambda message, answer: [answer]
    state: RecordDict = field(default_factory=RecordDict)
    config: dict[str, Any] = field(default_factory=dict)
    spec: Any = None  # of the app, for calibrations

    def answer(self, message: Message) -> list[Message]:
        context = Context(
            run_id=1,
            node_id=1,
            node_config={"partition-id": self.partition, **self.config},
            state=self.state,
            run_config={},
        )
        kind = message.metadata.message_type
        query = kind == "query"
        if kind == "evaluate":
            return self.bend(message, answer_query(message, context, self.spec, self.client))
        answer = (self.client.answer_query if query else self.client.train)(message, context)
        return [answer] if query else self.bend(message, answer)


class FakeGrid(Grid):
    """Carries messages to nodes in this process; a reply is there when its node's delay is over."""

    def __init__(self, nodes: dict[int, Node], time: Time) -> None:
        self.nodes, self.time = nodes, time
        self.sent: list[Message] = []
        self.ready: list[tuple[float, Message]] = []

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        return [number for number, node in self.nodes.items() if node.online]

    def get_nodes(self) -> list[NodeInfo]:
        return [
            NodeInfo(
                node_id=n,
                name=self.nodes[n].name,
                public_key=n.to_bytes(4, "big"),
                registered_at=f"{n:09d}",
            )
            for n in self.get_node_ids()
        ]

    def push_messages(self, messages: Any) -> list[str]:
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"m{len(self.sent)}"
            ids.append(f"m{len(self.sent)}")
            self.sent.append(message)
            node = self.nodes[message.metadata.dst_node_id]
            for answer in node.answer(message) if node.online else ():
                self.ready.append((self.time.time + node.delay, answer))
        return ids

    def pull_messages(self, message_ids: Any) -> list[Message]:
        """Like Flower's, but a stray message, whose id nobody asked for, gets through."""
        asked, sent = set(message_ids), {message.metadata.message_id for message in self.sent}
        due = [
            (at, reply)
            for at, reply in self.ready
            if at <= self.time.time
            and (
                reply.metadata.reply_to_message_id in asked
                or reply.metadata.reply_to_message_id not in sent
            )
        ]
        self.ready = [entry for entry in self.ready if entry not in due]
        return [reply for _, reply in due]

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
        raise NotImplementedError


@dataclass
class FakeFleet:
    """A federation's clients as nodes of a fake grid, and a server for them."""

    federation: Any
    engine_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        data, model = self.federation.data, self.federation.model
        self.time, self.log_lines = Time(), list[str]()
        self.nodes = {FIRST_NODE + i: Node(self.client(i), i) for i in reversed(range(len(data)))}
        self.grid = FakeGrid(self.nodes, self.time)
        self.roster = Roster(
            self.grid,
            clock=self.time,
            log=self.log_lines.append,
            frozen=model.frozen_fingerprint,
        )
        self.algorithm, self.schedule = self.federation.algorithm, self.federation.schedule
        initial = model.init_params(self.federation.seed, self.schedule.modes)
        theta, buffers = self.algorithm.start_modes(*initial)
        planned = self.schedule.init(len(data), self.federation.seed)
        self.state = EnsembleState(0, self.algorithm.init_mode(theta), buffers, planned)
        self.engine: FlowerEngine | None = None

    def client(self, index: int) -> LocalClient:
        data = self.federation.data
        x, y = data.client(index)
        own = replace(
            data, x=x, y=y, start=torch.tensor([0]), size=torch.tensor([len(x)]), names=None
        )
        return LocalClient(
            self.federation.model,
            self.federation.algorithm,
            own,
            self.federation.work,
            self.federation.seed,
        )

    def node(self, client: int) -> Node:
        return self.nodes[FIRST_NODE + client]

    def serve(self) -> FlowerEngine:
        """A server that has just started."""
        if not len(self.roster):
            self.roster.enrol(len(self.federation.data), 60.0)
        self.engine = FlowerEngine(
            self.roster,
            self.federation.seed,
            self.schedule.modes,
            "t",
            clock=self.time,
            **self.engine_options,
        )
        return self.engine

    def rounds(self, count: int) -> list[Any]:
        engine = self.engine or self.serve()
        logs = []
        for _ in range(count):
            self.state, report = run_round(
                self.state,
                algorithm=self.algorithm,
                schedule=self.schedule,
                engine=engine,
                aggregator=self.federation.aggregator,
            )
            logs.append((report, engine.log))
        return logs
