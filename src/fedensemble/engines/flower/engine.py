"""The engine of a real fleet: sends a round's visits as messages, and counts the answers that come in time."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import NamedTuple

import torch
from flwr.app import Message
from torch import Tensor

from ...core.aggregate import ModeMeans, gather
from ...core.algorithm import Algorithm
from ...core.engine import Engine
from ...core.keys import shared_coin
from ...core.probe import rehearse
from ...core.types import Members, Plan, Returned
from ...participation.places import quotas
from ...vectors import Tree, row_bytes, rows
from .checks import Answer, Limits, check_answer
from .enrol import Roster
from .post import Clock, Exchange
from .waiting import Patience, Places, RoundLog
from .wire import BUFFERS, UnreadableError, Visit, pack, visit_message

logger = logging.getLogger("flwr")  # Flower streams this one to whoever watches the run


class _Round(NamedTuple):
    """What answers are checked against."""

    algorithm: Algorithm
    still: Tree  # [K, P]
    buffers: Tensor  # [K, R]
    coin: Tensor  # [K, 1]


class FlowerEngine(Engine):
    """Lets enrolled clients train, wherever they are.

    The server keeps of a client only its place in the roster and, for each mode, the last round in which its answer
    counted. It tells the client, which goes on from its memory of that round: an answer that was late, refused or lost
    with the server leaves no trace in the client's memory either.

    Args:
        roster: the clients; enrolled before the first visit.
        seed: of the run.
        training: a name for the training as a whole.
    """

    def __init__(
        self, roster: Roster, seed: int, modes: int, training: str, patience: Patience | None = None,
        limits: Limits | None = None, clock: Clock | None = None,
    ) -> None:  # fmt: skip
        self.roster, self.seed, self.training = roster, seed, training
        self.patience, self.limits, self.clock = patience or Patience(), limits or Limits(), clock or Clock()
        self.sizes = torch.tensor([member.examples for member in roster.members])
        self.counted = torch.full((len(roster), modes), -1)
        self.log = RoundLog()
        self._overdue: list[tuple[float, Exchange, list[Visit]]] = []

    def visit(self, algorithm: Algorithm, sent: Tree, buffers: Tensor, plan: Plan, round: int) -> Returned:
        self.log = RoundLog(asked=len(plan.client))
        coin = shared_coin(self.seed, round, torch.arange(len(buffers))).to(buffers.dtype)
        kept = _Round(algorithm, rehearse(algorithm, sent, buffers, coin), buffers, coin)
        messages, visits = self._messages(sent, buffers, plan, round)
        answers = self._collect(messages, visits, kept)
        order = sorted(answers, key=lambda visit: (visit.client, visit.mode))
        for visit in order:
            self.counted[visit.client, visit.mode] = round
        for name, reason in [*self.log.lost.items(), *self.log.refused.items()]:
            logger.warning("round %d: %s does not count: %s", round + 1, name, reason)
        returned = self._sum_up(kept, {visit: answers[visit] for visit in order}, row_bytes({**sent, BUFFERS: buffers}))
        return returned._replace(cohort=replace(returned.cohort, round=round, lr=algorithm.rate(round)))

    def _messages(self, sent: Tree, buffers: Tensor, plan: Plan, round: int) -> tuple[list[Message], list[Visit]]:
        """A message for each visit whose client is there; a mode's model is one record, whoever gets it."""
        nodes = self.roster.nodes(self.patience.timeout)
        carried = {**sent, BUFFERS: buffers} if buffers.shape[-1] else sent
        models = {mode: pack(rows(carried, mode)) for mode in sorted(set(plan.mode.tolist()))}
        messages, visits = [], []
        for client, mode in zip(plan.client.tolist(), plan.mode.tolist(), strict=True):
            if client not in nodes:
                self.log.lost[self.roster.members[client].name] = "its node is offline"
                continue
            told = int(self.counted[client, mode])
            visits.append(Visit(self.training, round, client, mode, told, int(self.sizes.max())))
            messages.append(visit_message(models[mode], visits[-1], nodes[client], self.patience.timeout))
        return messages, visits

    def _collect(self, messages: list[Message], visits: list[Visit], kept: _Round) -> dict[Visit, Answer]:
        """Answers that count, until all places are taken, or everybody has answered, or time is up."""
        deadline = self.clock.now() + self.patience.timeout
        exchange, places, answers = Exchange(self.roster.grid, messages), self._places(visits), dict[int, Answer]()
        while exchange.waiting and not places.settled(exchange.waiting.values()):
            for index, message in exchange.look():
                if index is None:
                    self.log.stray.append(f"node {message.metadata.src_node_id}")
                    continue
                answer = self._judge(message, visits[index], kept)
                if answer is not None:
                    answers[index] = answer
                    places.came.append(index)
            if self.clock.now() >= deadline:
                break
            if exchange.waiting and not places.settled(exchange.waiting.values()):
                self.clock.sleep(min(self.patience.poll, max(deadline - self.clock.now(), 0.01)))
        taken = places.taken()
        unneeded = set(answers) - set(taken)
        if places.settled(exchange.waiting.values()):
            unneeded |= set(exchange.waiting.values())
        else:
            for index in exchange.waiting.values():
                self.log.lost[self._name(visits[index])] = f"no answer in {self.patience.timeout:g} s"
        for index in exchange.unsent:
            self.log.lost[self._name(visits[index])] = "Flower could not take its message"
        self.log.surplus = [self._name(visits[index]) for index in sorted(unneeded)]
        self.log.forgot = [self._name(visits[index]) for index in taken if answers[index].forgot]
        self.log.late = self._late()
        self._overdue.append((deadline, exchange, visits))
        return {visits[index]: answers[index] for index in taken}

    def _places(self, visits: list[Visit]) -> Places:
        """The round's places, shared out among the modes as in a simulation."""
        mode = torch.tensor([visit.mode for visit in visits], dtype=torch.int64)
        asked = torch.bincount(mode, minlength=self.counted.shape[1])
        keep = len(visits) if self.patience.keep is None else self.patience.keep
        return Places(mode, quotas(asked, keep, self.seed, visits[0].round) if visits else asked)

    def _judge(self, message: Message, visit: Visit, kept: _Round) -> Answer | None:
        """The answer in a message; None, and a line in the log, if there is none that counts."""
        if message.has_error():
            self.log.lost[self._name(visit)] = message.error.reason or f"error {message.error.code}"
            return None
        try:
            return check_answer(
                message, visit, kept.algorithm, kept.still, kept.buffers, kept.coin, int(self.sizes[visit.client]),
                self.limits,
            )  # fmt: skip
        except UnreadableError as problem:
            self.log.refused[self._name(visit)] = f"{problem} (node {message.metadata.src_node_id})"
            return None

    def _late(self) -> list[str]:
        """Whose answers to earlier rounds came in since; they are fetched only to be dropped."""
        names = [
            self._name(visits[place])
            for _, exchange, visits in self._overdue
            for place, message in exchange.look()
            if place is not None and message.has_content()
        ]
        now = self.clock.now()  # after their deadline messages are void, and Flower takes no answer to them
        self._overdue = [entry for entry in self._overdue if entry[1].waiting and now < entry[0]]
        return names

    def _name(self, visit: Visit) -> str:
        return self.roster.members[visit.client].name

    def _sum_up(self, kept: _Round, answers: dict[Visit, Answer], bytes_down: int) -> Returned:
        """Means by mode, added up in the order of clients, as the loop engine does."""
        uniform = kept.algorithm.weighting == "uniform"
        means, buffers, parts = ModeMeans(len(kept.buffers)), kept.buffers, []
        for visit, answer in answers.items():
            mode = torch.tensor([visit.mode])
            weight = torch.ones(1, dtype=buffers.dtype) if uniform else self.sizes[[visit.client]].to(buffers.dtype)
            uploads = {name: value.unsqueeze(0) for name, value in answer.uploads.items()}
            means.add(mode, weight, {**uploads, BUFFERS: answer.buffers.unsqueeze(0)})
            if kept.algorithm.gathers:
                parts.append(
                    Members(torch.tensor([visit.client]), mode, weight, uploads, buffers[mode] + answer.buffers)
                )
        uploads = means.mean() or {name: torch.zeros_like(value) for name, value in kept.still.items()}
        moved = uploads.pop(BUFFERS, torch.zeros_like(buffers))
        cohort = means.cohort(len(self.sizes), len(self.sizes) if uniform else int(self.sizes.sum()), kept.coin)
        return Returned(
            uploads=uploads,
            buffers=buffers + moved,
            cohort=replace(cohort, members=gather(parts)) if parts else cohort,
            loss=torch.tensor([answer.loss for answer in answers.values()], dtype=buffers.dtype),
            first_bad_step=torch.full((len(answers),), -1),
            bytes_up=torch.tensor([answer.bytes_up for answer in answers.values()], dtype=torch.int64),
            bytes_down=torch.full((len(answers),), bytes_down),
            answered=Plan(
                torch.tensor([visit.client for visit in answers], dtype=torch.int64),
                torch.tensor([visit.mode for visit in answers], dtype=torch.int64),
            ),
        )

    def memory_tensors(self) -> Tree:
        return {"counted": self.counted}

    def load_memory(self, tensors: Tree) -> None:
        self.counted = tensors["counted"]
