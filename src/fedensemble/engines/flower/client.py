"""A client's side: rebuilds the local problem, trains the mode it was sent, and answers."""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord
from torch import Tensor

from ...core.algorithm import Algorithm
from ...core.batches import LocalWork
from ...core.keys import shared_uniform
from ...core.secret import system_uniform
from ...core.types import Plan
from ...data.federated import FederatedData
from ...errors import InputError
from ...flat_params import Tree, rows
from ...modeling.functional_model import FunctionalModel
from ...runtime.oom import SMALLER_VISIT, raise_on_oom
from ...text import shorten
from ..local.block import BlockResult, Inputs, summarize_losses
from ..local.loop import LoopEngine
from .client_state import KeptMemory
from .messages import BUFFERS, MODEL, RESULT, UPLOAD, VISIT, Visit, pack, read_visit, reply, unpack

_MOST = 10_000_000  # clients of a fleet; some work of a client grows with its number


def check_visit(visit: Visit) -> None:
    """Raises if a server asks for something that no fleet has, before anything is made of its
    size.
    """
    if not re.fullmatch(r"[0-9a-zA-Z-]{1,64}", visit.training):  # it becomes part of a file's name
        raise InputError(
            f"The server calls its training '{shorten(visit.training)}'; letters and digits are expected."
        )
    ranges = {
        "round": (0, 2**31),
        "client": (0, _MOST),
        "mode": (0, 2**20),
        "counted": (-1, visit.round),
        "largest": (1, 2**53),
    }
    for name, (least, end) in ranges.items():
        if not least <= getattr(visit, name) < end:
            raise InputError(
                f"The server sends {name} = {getattr(visit, name)}; {least} to {end - 1} is expected."
            )


class LocalClient:
    """One client: its model's structure, its data, its method.

    Args:
        learner: the model's structure and loss.
        algorithm: the method.
        data: this client's examples, as FederatedData of one client.
        work: how much it trains.
        seed: of the run, as the server has it.
    """

    def __init__(
        self,
        learner: FunctionalModel,
        algorithm: Algorithm,
        data: FederatedData,
        work: LocalWork,
        seed: int,
    ) -> None:
        self.learner, self.algorithm, self.work, self.seed = learner, algorithm, work, seed
        self.data, self.examples = data, len(data.x)

    def answer_query(self, message: Message, context: Context) -> Message:
        """The answer to a query: how many examples there are, and which part of the data they
        are.
        """
        partition = context.node_config.get("partition-id", -1)
        return reply(
            message,
            {RESULT: MetricRecord({"examples": self.examples, "partition": int(partition)})},
        )

    def train(self, message: Message, context: Context) -> Message:
        """The answer to a visit; what the client remembers stays in `context.state`."""
        visit = read_visit(message.content)
        check_visit(visit)
        kept = KeptMemory.of(context)
        kept.forget_others(visit.training)
        found = kept.find(visit) if visit.counted >= 0 else None
        sent = {
            name: value.to(self.learner.device)
            for name, value in unpack(message.content, MODEL).items()
        }
        buffers = sent.pop(
            BUFFERS, torch.empty(0, dtype=self.learner.dtype, device=self.learner.device)
        )
        given, trained = self.visit(visit, sent, buffers, found)
        memory, loss, bad = rows(trained.memory, 0), *summarize_losses(trained, given)
        if memory and bool(loss.isfinite()):
            kept.keep(visit, memory)
        coin = shared_uniform(self.seed, visit.round, torch.tensor(visit.mode)).to(
            self.learner.dtype
        )
        upload = self.algorithm.encode(rows(trained.uploads, 0), coin)
        if len(buffers):
            upload = {**upload, BUFFERS: trained.buffers[0] - buffers}
        forgot = bool(memory) and visit.counted >= 0 and found is None
        result = {
            "examples": self.examples,
            "loss": float(loss),
            "first_bad_step": int(bad),
            "forgot": int(forgot),
        }
        said = {
            VISIT: ConfigRecord({**visit._asdict()}),
            UPLOAD: pack(upload),
            RESULT: MetricRecord({**result}),
        }
        return reply(message, said)

    def visit(
        self, visit: Visit, sent: Tree, buffers: Tensor, memory: Tree | None
    ) -> tuple[Inputs, BlockResult]:
        """One visit of the loop engine, with the keys of this client's number among all."""
        work = replace(self.work, batch_size=min(self.work.batch_size, visit.largest))
        everybody = visit.client + 1
        # Seen from here all clients up to this one hold these same rows; `expand` takes no memory
        # for that.
        alike = replace(
            self.data,
            start=self.data.start.expand(everybody),
            size=self.data.size.expand(everybody),
        )
        engine = LoopEngine(self.learner, alike, work, self.seed)
        engine.secret = system_uniform  # the server knows the seed
        plan = Plan(torch.tensor([visit.client]), torch.tensor([visit.mode]))
        one = {name: value.unsqueeze(0) for name, value in sent.items()}
        only = torch.tensor([0], device=buffers.device)
        given = engine.prepare(self.algorithm, one, only, buffers.unsqueeze(0), plan, visit.round)
        if memory is not None:
            given = given._replace(
                memory={n: value.to(self.learner.device)[None] for n, value in memory.items()}
            )
        with raise_on_oom("One visit does", self.learner.device, SMALLER_VISIT):
            return given, engine.train(self.algorithm, given, ragged=False)
