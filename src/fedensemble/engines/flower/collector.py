"""Collects a round's replies as they arrive, until its slots are filled or the time is up."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from flwr.app import Message

from ...participation.quotas import quotas
from ...text import shorten
from .deadline import ReplySlots, RoundLog, RoundTimeout
from .exchange import Clock, Exchange
from .messages import UnreadableError, Visit
from .reply_validation import ValidReply
from .roster import Roster

Validate = Callable[[Message, Visit], ValidReply]  # raises UnreadableError to reject a reply


class CollectedReplies(NamedTuple):
    """Result of one round's messages."""

    replies: dict[Visit, ValidReply]  # replies that got a slot
    passed: set[int]  # clients whose reply passed validation, with or without a slot
    failed: set[int]  # selected clients that did not reply, or whose reply was rejected


class _OverdueRound(NamedTuple):
    """An earlier round whose late replies are still fetched, in order to name their clients."""

    deadline: float
    exchange: Exchange
    visits: list[Visit]


class Collector:
    """Sends the messages of a round and collects the replies.

    Args:
        roster: the clients.
        round_timeout: how long a round waits, and for how many replies.
        seed: seed of the run.
        modes: number of modes, K.
    """

    def __init__(
        self, roster: Roster, round_timeout: RoundTimeout, clock: Clock, seed: int, modes: int
    ) -> None:
        self.roster, self.round_timeout, self.clock = roster, round_timeout, clock
        self.seed, self.modes = seed, modes
        self._overdue: list[_OverdueRound] = []

    def collect(
        self, messages: list[Message], visits: list[Visit], validate: Validate, log: RoundLog
    ) -> CollectedReplies:
        """Returns the replies that count once all slots are filled, all replied, or time is up."""
        deadline, failed = self.clock.now() + self.round_timeout.timeout, set[int]()
        exchange = Exchange(self.roster.grid, messages)
        slots, replies = self._make_slots(visits), dict[int, ValidReply]()
        while exchange.waiting and not slots.is_settled(exchange.waiting.values()):
            for index, message in exchange.poll():
                if index is None:
                    log.add_stray(f"node {message.metadata.src_node_id}")
                    continue
                reply = self._validate(message, visits[index], validate, log)
                if reply is None:
                    failed.add(visits[index].client)
                else:
                    replies[index] = reply
                    slots.arrived.append(index)
            if self.clock.now() >= deadline:
                break
            if exchange.waiting and not slots.is_settled(exchange.waiting.values()):
                remaining = max(deadline - self.clock.now(), 0.01)
                self.clock.sleep(min(self.round_timeout.poll, remaining))
        counted = slots.find_filled()
        surplus = set(replies) - set(counted)
        if slots.is_settled(exchange.waiting.values()):
            surplus |= set(exchange.waiting.values())
        else:
            for index in exchange.waiting.values():
                log.add_lost(
                    self._name(visits[index]), f"no reply in {self.round_timeout.timeout:g} s"
                )
                failed.add(visits[index].client)
        for index in exchange.unsent:
            log.add_lost(self._name(visits[index]), "Flower could not take its message")
        log.surplus = [self._name(visits[index]) for index in sorted(surplus)]
        log.forgot = [self._name(visits[index]) for index in counted if replies[index].state_lost]
        log.late = self._fetch_late_replies()
        self._overdue.append(_OverdueRound(deadline, exchange, visits))
        passed = {visits[index].client for index in replies}
        return CollectedReplies(
            {visits[index]: replies[index] for index in counted}, passed, failed
        )

    def _make_slots(self, visits: list[Visit]) -> ReplySlots:
        """Returns the round's reply slots, divided among the modes as in a simulation."""
        mode = torch.tensor([visit.mode for visit in visits], dtype=torch.int64)
        selected = torch.bincount(mode, minlength=self.modes)
        keep = len(visits) if self.round_timeout.keep is None else self.round_timeout.keep
        return ReplySlots(
            mode, quotas(selected, keep, self.seed, visits[0].round) if visits else selected
        )

    def _validate(
        self, message: Message, visit: Visit, validate: Validate, log: RoundLog
    ) -> ValidReply | None:
        """Returns the reply in a message; logs the reason and returns None if it is rejected."""
        if message.has_error():
            log.add_lost(self._name(visit), message.error.reason or f"error {message.error.code}")
            return None
        try:
            return validate(message, visit)
        except UnreadableError as problem:
            reason = str(problem)
        # Replies are untrusted input. No exception, whatever its type, may stop the fleet.
        except Exception as error:
            reason = f"it cannot be checked: {type(error).__name__}"
        log.add_rejected(
            self._name(visit), f"{shorten(reason, 160)} (node {message.metadata.src_node_id})"
        )
        return None

    def _fetch_late_replies(self) -> list[str]:
        """Returns the clients whose replies to earlier rounds arrived now, and drops these."""
        names = [
            self._name(overdue.visits[index])
            for overdue in self._overdue
            for index, message in overdue.exchange.poll()
            if index is not None and message.has_content()
        ]
        # Messages expire at their deadline. After that, Flower accepts no reply to them.
        now = self.clock.now()
        self._overdue = [
            overdue
            for overdue in self._overdue
            if overdue.exchange.waiting and now < overdue.deadline
        ]
        return names

    def _name(self, visit: Visit) -> str:
        return self.roster.members[visit.client].name
