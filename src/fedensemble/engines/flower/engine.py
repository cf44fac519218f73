"""The engine of a real fleet: sends a round's visits as messages, and counts the answers that come
in time.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from flwr.app import Message
from torch import Tensor

from ...core.aggregate import ModeMeans, gather
from ...core.algorithm import Algorithm
from ...core.engine import Engine
from ...core.keys import shared_uniform
from ...core.probe import expected_uploads
from ...core.types import EnsembleState, Members, Plan, RoundResult
from ...flat_params import Tree, payload_bytes, rows
from .clipping import limit_lengths
from .collector import Collector
from .deadline import RoundLog, RoundTimeout
from .exchange import Clock
from .finite_checks import Soundness
from .messages import BUFFERS, Visit, pack, visit_message
from .reply_validation import Answer, Limits, check_answer
from .roster import Roster
from .running_statistics import Statistics
from .suspension import Conduct, too_small
from .weight_limits import dominant, limited

logger = logging.getLogger("flwr")  # Flower streams this one to whoever watches the run


class _Round(NamedTuple):
    """What answers are checked against."""

    algorithm: Algorithm
    still: Tree  # [K, P]
    buffers: Tensor  # [K, R]
    coin: Tensor  # [K, 1]


@dataclass
class _Pending:
    """A round whose answers are in, until the server has taken its step."""

    round: int
    kept: _Round
    bytes_down: int  # of one visit
    skipped: list[int]  # clients that were planned, but are suspended
    recent: Tensor  # lengths of updates
    failed: set[int] = field(default_factory=set)  # clients that were refused or did not answer
    passed: set[int] = field(default_factory=set)  # clients whose answer passed the checks
    answers: dict[Visit, Answer] = field(default_factory=dict)  # those that count


class FlowerEngine(Engine):
    """Lets enrolled clients train, wherever they are.

    The server keeps of a client only its place in the roster and, for each mode, the last round in
    which its answer counted. It tells the client, which goes on from its memory of that round: an
    answer that was late, refused or lost with the server leaves no trace in the client's memory
    either.

    Args:
        roster: the clients; enrolled before the first visit.
        seed: of the run.
        training: a name for the training as a whole.
        statistics: what is known of the entries of the model's buffers.
        soundness: the last check of a mode before it replaces the one before.
    """

    def __init__(
        self,
        roster: Roster,
        seed: int,
        modes: int,
        training: str,
        patience: RoundTimeout | None = None,
        limits: Limits | None = None,
        clock: Clock | None = None,
        statistics: Statistics | None = None,
        soundness: Soundness | None = None,
    ) -> None:
        self.roster, self.seed, self.training = roster, seed, training
        self.patience, self.limits, self.clock = (
            patience or RoundTimeout(),
            limits or Limits(),
            clock or Clock(),
        )
        self.statistics, self.soundness = statistics, soundness or Soundness()
        self.sizes = torch.tensor([member.examples for member in roster.members])
        # where clients count by their examples
        self.weights = limited(self.sizes, self.limits.max_weight)
        self.counted = torch.full((len(roster), modes), -1)
        self.conduct = Conduct(len(roster), self.limits.suspend_after)
        # lengths of the last updates, see `limit_lengths`
        self.recent = torch.empty(0, 0, dtype=torch.float64)
        self.log = RoundLog()
        self._pending: _Pending  # from a visit on
        self.collector = Collector(roster, self.patience, self.clock, seed, modes)

    def visit(
        self, algorithm: Algorithm, sent: Tree, buffers: Tensor, plan: Plan, round: int
    ) -> RoundResult:
        absent = self.conduct.absent(plan.client)
        skipped = sorted(set(plan.client[absent].tolist()))
        self.log = RoundLog(
            asked=int((~absent).sum()), skipped=[self.roster.members[i].name for i in skipped]
        )
        coin = shared_uniform(self.seed, round, torch.arange(len(buffers))).to(buffers.dtype)
        kept = _Round(algorithm, expected_uploads(algorithm, sent, buffers, coin), buffers, coin)
        pending = _Pending(
            round, kept, payload_bytes({**sent, BUFFERS: buffers}), skipped, self.recent
        )
        self._pending = pending
        messages, visits = self._messages(
            sent, buffers, Plan(plan.client[~absent], plan.mode[~absent]), round
        )
        answers, pending.passed, pending.failed = self.collector.collect(
            messages, visits, self._check, self.log
        )
        ordered = {
            visit: answers[visit]
            for visit in sorted(answers, key=lambda visit: (visit.client, visit.mode))
        }
        pending.answers = self._large_enough(self._limit_lengths(ordered, kept))
        self._note_weights(algorithm, list(pending.answers))
        for line in self.log.warnings():
            logger.warning("round %d: %s", round + 1, line)
        return self._returned()

    def review(self, before: EnsembleState, after: EnsembleState) -> RoundResult | None:
        """The round without the modes that the server's step made unusable: they keep their last
        good state.
        """
        pending, answers = self._pending, self._pending.answers
        self.log.broken = self.soundness.broken(after, (visit.mode for visit in answers))
        if not self.log.broken:
            return None
        for mode in self.log.broken:
            logger.warning(
                "round %d: mode %d has values or predictions that are not finite; it keeps its last good state",
                pending.round + 1,
                mode,
            )
        pending.answers = {
            visit: a for visit, a in answers.items() if visit.mode not in self.log.broken
        }
        return self._returned()

    def commit(self) -> None:
        pending = self._pending
        for visit in pending.answers:
            self.counted[visit.client, visit.mode] = pending.round
        pending.answers = {}  # they are as large as all models that came in
        self.recent = pending.recent
        fresh = self.conduct.record(pending.skipped, pending.failed, pending.passed)
        self.log.suspended = {
            self.roster.members[client].name: visits for client, visits in fresh.items()
        }
        for name, visits in self.log.suspended.items():
            logger.warning(
                "round %d: %s failed too often; it misses its next %d visits",
                pending.round + 1,
                name,
                visits,
            )

    def _limit_lengths(self, answers: dict[Visit, Answer], kept: _Round) -> dict[Visit, Answer]:
        """Answers whose updates are not much longer than the others', shortened where they are
        longer.
        """
        limits = self.limits
        if limits.clip_factor is None and limits.refuse_factor is None:
            return answers
        result = limit_lengths(
            answers, kept.still, self.recent, limits.clip_factor, limits.refuse_factor
        )
        self._pending.recent = result.recent
        for visit, reason in result.refused.items():
            self.log.refuse(self._name(visit), reason)
            self._pending.failed.add(visit.client)
        self.log.clipped = {self._name(visit): factor for visit, factor in result.clipped.items()}
        return result.answers

    def _large_enough(self, answers: dict[Visit, Answer]) -> dict[Visit, Answer]:
        """Answers to modes that enough clients trained: the mean over one client is that client's
        upload.
        """
        small = too_small([visit.mode for visit in answers], self.limits.min_cohort)
        self.log.small_cohorts = sorted({*self.log.small_cohorts, *small})
        self.log.unused = sorted({self._name(visit) for visit in answers if visit.mode in small})
        return {visit: answer for visit, answer in answers.items() if visit.mode not in small}

    def _note_weights(self, algorithm: Algorithm, visits: list[Visit]) -> None:
        """Names clients that decide a mode's mean by the examples they claim."""
        if algorithm.weighting == "examples" and visits:
            weight = self.weights[[visit.client for visit in visits]]
            found = dominant(torch.tensor([visit.mode for visit in visits]), weight)
            self.log.dominant = {self._name(visits[index]): share for index, share in found.items()}

    def _messages(
        self, sent: Tree, buffers: Tensor, plan: Plan, round: int
    ) -> tuple[list[Message], list[Visit]]:
        """A message for each visit whose client is there; a mode's model is one record, whoever
        gets it.
        """
        nodes = self.roster.nodes(self.patience.timeout)
        carried = {**sent, BUFFERS: buffers} if buffers.shape[-1] else sent
        models = {mode: pack(rows(carried, mode)) for mode in sorted(set(plan.mode.tolist()))}
        messages, visits, pairs = (
            [],
            [],
            list(zip(plan.client.tolist(), plan.mode.tolist(), strict=True)),
        )
        # Clients whose answers could not count anyway, because their mode has too few, need not
        # train.
        small = too_small(
            [mode for client, mode in pairs if client in nodes], self.limits.min_cohort
        )
        self.log.small_cohorts = sorted(small)
        for client, mode in pairs:
            if client not in nodes:
                self.log.lose(self.roster.members[client].name, "its node is offline")
                continue
            if mode in small:
                self.log.asked -= 1
                continue
            told = int(self.counted[client, mode])
            visits.append(Visit(self.training, round, client, mode, told, int(self.sizes.max())))
            messages.append(
                visit_message(models[mode], visits[-1], nodes[client], self.patience.timeout)
            )
        return messages, visits

    def _check(self, message: Message, visit: Visit) -> Answer:
        """The answer in a message; raises if it must not count."""
        kept, examples = self._pending.kept, int(self.sizes[visit.client])
        return check_answer(
            message,
            visit,
            kept.algorithm,
            kept.still,
            kept.buffers,
            kept.coin,
            examples,
            self.limits,
            self.statistics,
        )

    def _name(self, visit: Visit) -> str:
        return self.roster.members[visit.client].name

    def _returned(self) -> RoundResult:
        """What the server's step takes: the pending answers, whether all of them or those that are
        left.
        """
        pending = self._pending
        returned = self._sum_up(pending.kept, pending.answers, pending.bytes_down)
        lr = pending.kept.algorithm.rate(pending.round)
        return returned._replace(cohort=replace(returned.cohort, round=pending.round, lr=lr))

    def _sum_up(self, kept: _Round, answers: dict[Visit, Answer], bytes_down: int) -> RoundResult:
        """Means by mode, added up in the order of clients, as the loop engine does."""
        uniform = kept.algorithm.weighting == "uniform"
        means, buffers, parts = ModeMeans(len(kept.buffers)), kept.buffers, []
        for visit, answer in answers.items():
            mode = torch.tensor([visit.mode])
            weight = (
                torch.ones(1, dtype=buffers.dtype)
                if uniform
                else self.weights[[visit.client]].to(buffers.dtype)
            )
            uploads = {name: value.unsqueeze(0) for name, value in answer.uploads.items()}
            means.add(mode, weight, {**uploads, BUFFERS: answer.buffers.unsqueeze(0)})
            if kept.algorithm.gathers:
                parts.append(
                    Members(
                        torch.tensor([visit.client]),
                        mode,
                        weight,
                        uploads,
                        buffers[mode] + answer.buffers,
                    )
                )
        uploads = means.mean() or {
            name: torch.zeros_like(value) for name, value in kept.still.items()
        }
        moved = uploads.pop(BUFFERS, torch.zeros_like(buffers))
        cohort = means.cohort(
            len(self.sizes), len(self.sizes) if uniform else float(self.weights.sum()), kept.coin
        )
        return RoundResult(
            uploads=uploads,
            buffers=buffers + moved
            if self.statistics is None
            else self.statistics.repair(buffers + moved),
            cohort=replace(cohort, members=gather(parts)) if parts else cohort,
            loss=torch.tensor([answer.loss for answer in answers.values()], dtype=buffers.dtype),
            first_bad_step=torch.full((len(answers),), -1),
            bytes_up=torch.tensor(
                [answer.bytes_up for answer in answers.values()], dtype=torch.int64
            ),
            bytes_down=torch.full((len(answers),), bytes_down),
            answered=Plan(
                torch.tensor([visit.client for visit in answers], dtype=torch.int64),
                torch.tensor([visit.mode for visit in answers], dtype=torch.int64),
            ),
        )

    def memory_tensors(self) -> Tree:
        return {"counted": self.counted, "recent": self.recent, **self.conduct.tensors()}

    def load_memory(self, tensors: Tree) -> None:
        self.counted = tensors["counted"]
        self.recent = tensors.get("recent", self.recent)  # not in checkpoints of earlier versions
        self.conduct.load(tensors)
