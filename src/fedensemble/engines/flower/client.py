"""Client side: rebuilds the local problem of a visit, trains the received mode, and replies."""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord
from torch import Tensor

from ...core.algorithm import Algorithm
from ...core.secret import system_uniform
from ...core.types import Plan
from ...core.visits.batches import MAX_STEPS, LocalWork
from ...core.visits.visit_keys import shared_uniform
from ...data.federated import FederatedData
from ...errors import InputError
from ...flat_params import Tree, select_rows
from ...modeling.frozen import same_fingerprint
from ...modeling.functional_model import FunctionalModel
from ...runtime.oom import advise_smaller_visit, raise_on_oom
from ...text import shorten
from ..local.block import BlockInputs, BlockResult, summarize_losses
from ..local.loop import LoopEngine
from ..local.received import measure_received
from .client_state import ClientStateStore
from .messages import (
    BUFFERS,
    MODEL,
    PROBLEM,
    REPORTS,
    RESULT,
    UPLOAD,
    VISIT,
    Visit,
    build_reply,
    pack,
    read_frozen,
    read_visit,
    unpack,
)

# Upper bound on the number of clients of a fleet. Some work of a client grows with its index, so
# without a bound a hostile server could make a single visit arbitrarily expensive.
_MAX_CLIENTS = 10_000_000


def check_visit(visit: Visit) -> None:
    """Raises InputError if a visit has values that no fleet has. Call it before allocating."""
    if not re.fullmatch(r"[0-9a-zA-Z-]{1,64}", visit.training):  # becomes part of a file name
        raise InputError(
            f"The server calls its training '{shorten(visit.training)}'; "
            "letters and digits are expected."
        )
    ranges = {
        "round": (0, 2**31),
        "client": (0, _MAX_CLIENTS),
        "mode": (0, 2**20),
        "counted": (-1, visit.round),
        "largest": (1, 2**53),
        "steps": (0, MAX_STEPS + 1),
        "report": (0, 2),
    }
    for name, (start, end) in ranges.items():
        value = getattr(visit, name)
        if not start <= value < end:
            raise InputError(
                f"The server sends {name} = {value}; {start} to {end - 1} is expected."
            )


def answer_with_problem(message: Message, context: Context, problem: str) -> Message:
    """Returns the reply to a query of a client that cannot enrol: its partition-id, and why."""
    content = {
        RESULT: MetricRecord({"examples": 0, "partition": _partition(context)}),
        PROBLEM: ConfigRecord({PROBLEM: shorten(problem)}),
    }
    return build_reply(message, content)


def _partition(context: Context) -> int:
    """Returns the partition-id that a node claims, or -1."""
    return int(context.node_config.get("partition-id", -1))


class LocalClient:
    """One client: the model, the algorithm and the client's data.

    Args:
        functional_model: the model as a function, with its loss.
        algorithm: the federated algorithm.
        data: this client's examples, as FederatedData of one client.
        work: the amount of local training per visit.
        seed: seed of the run, the same as on the server.
    """

    def __init__(
        self,
        model: FunctionalModel,
        algorithm: Algorithm,
        data: FederatedData,
        work: LocalWork,
        seed: int,
    ) -> None:
        self.model, self.algorithm, self.work, self.seed = model, algorithm, work, seed
        self.data, self.examples = data, len(data.x)

    def answer_query(self, message: Message, context: Context) -> Message:
        """Returns the reply to a query: the number of examples and the node's partition-id.

        A client with other frozen parameters than the server cannot enrol.
        """
        if problem := self._compare_frozen(message):
            return answer_with_problem(message, context, problem)
        metrics = MetricRecord({"examples": self.examples, "partition": _partition(context)})
        return build_reply(message, {RESULT: metrics})

    def train(self, message: Message, context: Context) -> Message:
        """Returns the reply to a visit. The client's state stays in `context.state`."""
        visit = read_visit(message.content)
        check_visit(visit)
        if problem := self._compare_frozen(message):  # its files may have changed since
            raise InputError(f"This client {problem}.")
        store = ClientStateStore.from_context(context)
        store.delete_expired(visit.training)
        previous_state = store.load(visit) if visit.counted >= 0 else None
        sent = {
            name: value.to(self.model.device)
            for name, value in unpack(message.content, MODEL).items()
        }
        buffers = sent.pop(
            BUFFERS, torch.empty(0, dtype=self.model.dtype, device=self.model.device)
        )
        # Personal running statistics do not travel: the visit replaces them by the client's own.
        buffers = self.algorithm.whole_buffers(buffers)
        inputs, result, report = self.run_visit(visit, sent, buffers, previous_state)
        new_state = select_rows(result.memory, 0)
        loss, first_bad_step = summarize_losses(result, inputs)
        # The server rejects the reply of a diverged visit, so its state could never count.
        if new_state and bool(loss.isfinite()):
            store.save(visit, new_state)
        uniform_draw = shared_uniform(self.seed, visit.round, torch.tensor(visit.mode)).to(
            self.model.dtype
        )
        upload = self.algorithm.encode(select_rows(result.uploads, 0), uniform_draw)
        if len(change := self.algorithm.sent_buffers(result.buffers[0] - buffers)):
            upload = {**upload, BUFFERS: change}
        state_lost = bool(new_state) and visit.counted >= 0 and previous_state is None
        metrics = {
            "examples": self.examples,
            "loss": float(loss),
            "first_bad_step": int(first_bad_step),
            "forgot": int(state_lost),
            **report,
        }
        content = {
            VISIT: ConfigRecord({**visit._asdict()}),
            UPLOAD: pack(upload),
            RESULT: MetricRecord({**metrics}),
        }
        return build_reply(message, content)

    def _compare_frozen(self, message: Message) -> str:
        """Returns what is wrong with the frozen parameters of this client, or ""."""
        if same_fingerprint(read_frozen(message.content), self.model.frozen_fingerprint):
            return ""
        return (
            "has built other frozen parameters (requires_grad=False) than the server: give both "
            "the same file of weights"
        )

    def run_visit(
        self, visit: Visit, sent: Tree, buffers: Tensor, memory: Tree | None
    ) -> tuple[BlockInputs, BlockResult, dict[str, float]]:
        """Runs one visit of the loop engine; returns its inputs, its result and its report.

        Args:
            sent: parameters of the mode, [P] each.
            buffers: running statistics of the mode, [R].
            memory: this client's state for the mode, or None on a first visit.
        """
        work = replace(self.work, batch_size=min(self.work.batch_size, visit.largest))
        # Random keys depend on the client's index among all clients. To get the same keys as in a
        # simulation, pretend that clients 0 to `visit.client` all hold this client's rows. `expand`
        # makes views with stride 0, so that this allocates nothing.
        num_clients = visit.client + 1
        data = replace(
            self.data,
            start=self.data.start.expand(num_clients),
            size=self.data.size.expand(num_clients),
        )
        engine = LoopEngine(self.model, data, work, self.seed)
        # Secret noise must not come from the run's seed, because the server knows the seed.
        engine.secret = system_uniform
        steps = torch.tensor([visit.steps]) if visit.steps else None
        plan = Plan(torch.tensor([visit.client]), torch.tensor([visit.mode]), steps)
        modes = {name: value.unsqueeze(0) for name, value in sent.items()}
        mode_index = torch.tensor([0], device=buffers.device)
        inputs = engine.prepare(
            self.algorithm, modes, mode_index, buffers.unsqueeze(0), plan, visit.round
        )
        if memory is not None:
            inputs = inputs._replace(
                memory={name: value.to(self.model.device)[None] for name, value in memory.items()}
            )
        with raise_on_oom("One visit does", self.model.device, advise_smaller_visit()):
            report = {}
            if visit.report:
                values = measure_received(engine, self.algorithm, plan, inputs)
                report = {name: float(v) for name, v in zip(REPORTS, values, strict=True)}
            return inputs, engine.train(self.algorithm, inputs, ragged=False), report
