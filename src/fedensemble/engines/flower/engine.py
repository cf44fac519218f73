"""Engine for real clients: sends a round's visits as messages and counts the replies in time."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from flwr.app import Message
from torch import Tensor

from ...core.algorithm import Algorithm
from ...core.engine import Engine
from ...core.mode_means import ModeMeans, gather
from ...core.probe import expected_uploads
from ...core.types import EnsembleState, GatheredUploads, Plan, RoundResult, VisitReports
from ...core.visits.joint import trained_modes
from ...core.visits.visit_keys import shared_uniform
from ...core.visits.visit_reports import make_reports, update_norms
from ...errors import DivergedError
from ...flat_params import Tree, payload_bytes, select_rows
from .clipping import limit_lengths
from .collector import Collector
from .deadline import RoundLog, RoundTimeout
from .exchange import Clock
from .messages import BUFFERS, Visit, build_visit_message, pack
from .mode_checks import FiniteModeCheck
from .reply_validation import Limits, ValidReply, validate_reply
from .roster import Roster
from .running_statistics import BufferRules
from .suspension import SuspensionTracker, find_small_cohorts
from .weight_limits import cap_weights, find_dominant

logger = logging.getLogger("flwr")  # Flower streams this logger to `flwr run --stream`


class _RoundInputs(NamedTuple):
    """What replies of a round are validated against."""

    algorithm: Algorithm
    gathers: bool  # whether the server needs each upload
    reference: Tree  # upload of a client with zero gradient, [K, P]
    buffers: Tensor  # [K, R]
    uniform_draw: Tensor  # [K, 1]


@dataclass
class _PendingRound:
    """A round whose replies have arrived, until the server has taken its step."""

    round: int
    inputs: _RoundInputs
    bytes_down: int  # per visit
    skipped: list[int]  # clients that were planned but are suspended
    recent_lengths: Tensor  # lengths of the last updates
    failed: set[int] = field(default_factory=set)  # clients that were rejected or did not reply
    passed: set[int] = field(default_factory=set)  # clients whose reply passed validation
    replies: dict[Visit, ValidReply] = field(default_factory=dict)  # those that count


class FlowerEngine(Engine):
    """Trains on enrolled clients, on any machine that Flower reaches.

    Of each client, the server keeps its index in the roster and, per mode, the last round in which
    its reply counted. Each message states that round, and the client continues from its state after
    it. A reply that was late, rejected or lost in a crash of the server therefore has no effect on
    the client's state either.

    Args:
        roster: the clients; enrolled before the first visit.
        seed: seed of the run.
        modes: number of modes, K.
        training: id of the training job; clients keep their state under it.
        round_timeout: how long a round waits, and for how many replies.
        limits: limits on replies.
        buffer_rules: constraints on the model's running statistics, or None.
        finite_check: last check of a mode before it replaces its previous state.
    """

    def __init__(
        self,
        roster: Roster,
        seed: int,
        modes: int,
        training: str,
        round_timeout: RoundTimeout | None = None,
        limits: Limits | None = None,
        clock: Clock | None = None,
        buffer_rules: BufferRules | None = None,
        finite_check: FiniteModeCheck | None = None,
    ) -> None:
        self.roster, self.seed, self.training = roster, seed, training
        self.round_timeout, self.limits = round_timeout or RoundTimeout(), limits or Limits()
        self.clock = clock or Clock()
        self.buffer_rules, self.finite_check = buffer_rules, finite_check or FiniteModeCheck()
        self.modes = modes
        self.sizes = torch.tensor([member.examples for member in roster.members])
        # used by algorithms that weight clients by their number of examples
        self.weights = cap_weights(self.sizes, self.limits.max_weight)
        # last round in which a client's reply for a mode counted, or -1, [N, K]
        self.counted = torch.full((len(roster), modes), -1)
        self.suspensions = SuspensionTracker(len(roster), self.limits.suspend_after)
        # lengths of the last updates, see `limit_lengths`
        self.recent_lengths = torch.empty(0, 0, dtype=torch.float64)
        self.log = RoundLog()
        self._pending: _PendingRound  # set by `run_visits`
        self.collector = Collector(roster, self.round_timeout, self.clock, seed, modes)

    def run_visits(
        self, algorithm: Algorithm, sent: Tree, buffers: Tensor, plan: Plan, round: int
    ) -> RoundResult:
        suspended = self.suspensions.is_suspended(plan.client)
        skipped = sorted(set(plan.client[suspended].tolist()))
        self.log = RoundLog(
            asked=int((~suspended).sum()), skipped=[self.roster.members[i].name for i in skipped]
        )
        uniform_draw = shared_uniform(self.seed, round, torch.arange(len(buffers))).to(
            buffers.dtype
        )
        reference = expected_uploads(algorithm, sent, buffers, uniform_draw)
        gathers = algorithm.gathers_uploads(sent)
        inputs = _RoundInputs(algorithm, gathers, reference, buffers, uniform_draw)
        bytes_down = payload_bytes({**sent, BUFFERS: algorithm.sent_buffers(buffers)})
        pending = _PendingRound(round, inputs, bytes_down, skipped, self.recent_lengths)
        self._pending = pending
        travelling = algorithm.sent_buffers(buffers)
        messages, visits = self._build_messages(sent, travelling, plan.select(~suspended), round)
        replies, pending.passed, pending.failed = self.collector.collect(
            messages, visits, self._validate, self.log
        )
        # Sums of floats depend on their order. Sort by client and mode, not by arrival, so that a
        # run is reproducible and equals the loop engine.
        ordered = {
            visit: replies[visit]
            for visit in sorted(replies, key=lambda visit: (visit.client, visit.mode))
        }
        limited = self._limit_lengths(ordered, inputs)
        pending.replies = self._drop_small_cohorts(limited, algorithm)
        self._log_dominant_clients(algorithm, list(pending.replies))
        for line in self.log.format_warnings():
            logger.warning("round %d: %s", round + 1, line)
        return self._build_result()

    def review(self, before: EnsembleState, after: EnsembleState) -> RoundResult | None:
        """Returns the round without the modes that the server's step broke, or None if none is.

        Broken modes keep their last good state; if visits are joint, all modes do.
        """
        pending, replies = self._pending, self._pending.replies
        joint = pending.inputs.algorithm.joint
        checked = range(self.modes) if joint else (visit.mode for visit in replies)
        self.log.broken = self.finite_check.find_broken(after, checked)
        if not self.log.broken:
            return None
        for mode in self.log.broken:
            logger.warning(
                "round %d: mode %d has values or predictions that are not finite; "
                "it keeps its last good state",
                pending.round + 1,
                mode,
            )
        # A joint visit is for several modes: none of them counts if one breaks.
        pending.replies = {
            visit: reply
            for visit, reply in replies.items()
            if not joint and visit.mode not in self.log.broken
        }
        return self._build_result()

    def reject_coupling(self, error: DivergedError) -> None:
        """Logs the error: the values of clients must not be able to end the training of all."""
        logger.warning("%s The modes of this round stay uncoupled.", error)

    def commit(self) -> None:
        pending = self._pending
        for visit in pending.replies:
            self.counted[visit.client, visit.mode] = pending.round
        pending.replies = {}  # frees the uploads: one model per reply
        self.recent_lengths = pending.recent_lengths
        newly_suspended = self.suspensions.record(pending.skipped, pending.failed, pending.passed)
        self.log.suspended = {
            self.roster.members[client].name: visits for client, visits in newly_suspended.items()
        }
        for name, visits in self.log.suspended.items():
            logger.warning(
                "round %d: %s failed too often: it is suspended for its next %d visits",
                pending.round + 1,
                name,
                visits,
            )

    def _limit_lengths(
        self, replies: dict[Visit, ValidReply], inputs: _RoundInputs
    ) -> dict[Visit, ValidReply]:
        """Returns the replies after `limit_lengths`, and logs what was clipped or rejected."""
        limits = self.limits
        if limits.clip_factor is None and limits.refuse_factor is None:
            return replies
        result = limit_lengths(
            replies, inputs.reference, self.recent_lengths, limits.clip_factor, limits.refuse_factor
        )
        self._pending.recent_lengths = result.recent_lengths
        for visit, reason in result.rejected.items():
            self.log.add_rejected(self._name(visit), reason)
            self._pending.failed.add(visit.client)
        self.log.clipped = {self._name(visit): factor for visit, factor in result.clipped.items()}
        return result.replies

    def _drop_small_cohorts(
        self, replies: dict[Visit, ValidReply], algorithm: Algorithm
    ) -> dict[Visit, ValidReply]:
        """Returns the replies for modes with at least `min_cohort` of them.

        The mean over one client is that client's upload, and the mode's next client would get it.
        The modes of a joint visit are those that the client says it has trained.
        """
        trained = {visit: [visit.mode] for visit in replies}
        if algorithm.joint:
            trained = {v: trained_modes(r.uploads, self.modes) for v, r in replies.items()}
        modes = [mode for each in trained.values() for mode in each]
        small = find_small_cohorts(modes, self.limits.min_cohort)
        kept = {v: reply for v, reply in replies.items() if not small & set(trained[v])}
        self.log.small_cohorts = sorted({*self.log.small_cohorts, *small})
        self.log.unused = sorted({self._name(visit) for visit in replies if visit not in kept})
        return kept

    def _log_dominant_clients(self, algorithm: Algorithm, visits: list[Visit]) -> None:
        """Logs clients that dominate a mode's mean through the number of examples they claim."""
        if algorithm.weighting == "examples" and visits:
            weight = self.weights[[visit.client for visit in visits]]
            shares = find_dominant(torch.tensor([visit.mode for visit in visits]), weight)
            self.log.dominant = {
                self._name(visits[index]): share for index, share in shares.items()
            }

    def _build_messages(
        self, sent: Tree, buffers: Tensor, plan: Plan, round: int
    ) -> tuple[list[Message], list[Visit]]:
        """Returns one message per visit whose client is online, and the visits.

        All clients of a mode get the same record object, so that Flower stores each model once.
        """
        nodes = self.roster.find_nodes(self.round_timeout.timeout)
        tensors = {**sent, BUFFERS: buffers} if buffers.shape[-1] else sent
        models = {
            mode: pack(select_rows(tensors, mode)) for mode in sorted(set(plan.mode.tolist()))
        }
        messages, visits = [], []
        pairs = list(zip(plan.client.tolist(), plan.mode.tolist(), strict=True))
        steps = [0] * len(pairs) if plan.steps is None else plan.steps.tolist()
        # If a mode has too few online clients, their replies could not count. Do not let them train
        # in vain.
        small = find_small_cohorts(
            [mode for client, mode in pairs if client in nodes], self.limits.min_cohort
        )
        self.log.small_cohorts = sorted(small)
        for (client, mode), visit_steps in zip(pairs, steps, strict=True):
            if client not in nodes:
                self.log.add_lost(self.roster.members[client].name, "its node is offline")
                continue
            if mode in small:
                self.log.asked -= 1
                continue
            counted = int(self.counted[client, mode])
            visit = Visit(
                self.training,
                round,
                client,
                mode,
                counted,
                int(self.sizes.max()),
                visit_steps,
                int(self.reports_visits),
            )
            visits.append(visit)
            messages.append(
                build_visit_message(
                    models[mode],
                    visit,
                    nodes[client],
                    self.round_timeout.timeout,
                    self.roster.frozen,
                )
            )
        return messages, visits

    def _validate(self, message: Message, visit: Visit) -> ValidReply:
        """Returns the reply in a message; raises UnreadableError if it is rejected."""
        inputs = self._pending.inputs
        return validate_reply(
            message,
            visit,
            inputs.algorithm,
            inputs.reference,
            inputs.buffers,
            inputs.uniform_draw,
            int(self.sizes[visit.client]),
            self.limits,
            self.buffer_rules,
        )

    def _name(self, visit: Visit) -> str:
        return self.roster.members[visit.client].name

    def _build_result(self) -> RoundResult:
        """Returns the input of the server's step, from the pending replies."""
        pending = self._pending
        result = self._aggregate(pending.inputs, pending.replies, pending.bytes_down)
        lr = pending.inputs.algorithm.learning_rate(pending.round)
        cohort = replace(result.cohort, round=pending.round, lr=lr, least=self.limits.min_cohort)
        return result._replace(cohort=cohort)

    def _aggregate(
        self, inputs: _RoundInputs, replies: dict[Visit, ValidReply], bytes_down: int
    ) -> RoundResult:
        """Returns the means per mode, summed in the order of clients as in the loop engine."""
        uniform = inputs.algorithm.weighting == "uniform"
        means, buffers, members = ModeMeans(len(inputs.buffers)), inputs.buffers, []
        for visit, reply in replies.items():
            mode = torch.tensor([visit.mode])
            weight = (
                torch.ones(1, dtype=buffers.dtype)
                if uniform
                else self.weights[[visit.client]].to(buffers.dtype)
            )
            uploads = {name: value.unsqueeze(0) for name, value in reply.uploads.items()}
            means.add(mode, weight, {**uploads, BUFFERS: reply.buffers.unsqueeze(0)})
            if inputs.gathers:
                members.append(
                    GatheredUploads(
                        torch.tensor([visit.client]),
                        mode,
                        weight,
                        uploads,
                        self._clamp(buffers[mode] + reply.buffers),
                    )
                )
        uploads = means.mean() or {
            name: torch.zeros_like(value) for name, value in inputs.reference.items()
        }
        buffers = self._clamp(buffers + uploads.pop(BUFFERS, torch.zeros_like(buffers)))
        total_weight = len(self.sizes) if uniform else float(self.weights.sum())
        cohort = means.cohort(len(self.sizes), total_weight, inputs.uniform_draw)
        return RoundResult(
            uploads=uploads,
            buffers=buffers,
            cohort=replace(cohort, members=gather(members)) if members else cohort,
            loss=torch.tensor([reply.loss for reply in replies.values()], dtype=buffers.dtype),
            first_bad_step=torch.full((len(replies),), -1),
            bytes_up=torch.tensor(
                [reply.bytes_up for reply in replies.values()], dtype=torch.int64
            ),
            bytes_down=torch.full((len(replies),), bytes_down),
            answered=Plan(
                torch.tensor([visit.client for visit in replies], dtype=torch.int64),
                torch.tensor([visit.mode for visit in replies], dtype=torch.int64),
            ),
            reports=self._reports(inputs, replies) if self.reports_visits else None,
        )

    def _clamp(self, buffers: Tensor) -> Tensor:
        """Returns running statistics without negative variances, which rounding can cause."""
        rules = self.buffer_rules
        return buffers if rules is None else rules.clamp_variances(buffers)

    def _reports(self, inputs: _RoundInputs, replies: dict[Visit, ValidReply]) -> VisitReports:
        """Returns what clients report, and the lengths of the updates that count."""
        rows = []
        for visit, reply in replies.items():
            length = update_norms(reply.uploads, select_rows(inputs.reference, visit.mode))
            rows.append([*(reply.received or (0.0, 0.0)), float(length)])
        table = torch.tensor(rows, dtype=torch.float64).reshape(-1, 3).T
        return make_reports(table, self._pending.round)

    def client_state_tensors(self) -> Tree:
        return {
            "counted": self.counted,
            "recent": self.recent_lengths,
            **self.suspensions.to_tensors(),
        }

    def load_client_state(self, tensors: Tree) -> None:
        self.counted = tensors["counted"]
        # Checkpoints of earlier versions have no tensor "recent".
        self.recent_lengths = tensors.get("recent", self.recent_lengths)
        self.suspensions.load_tensors(tensors)
