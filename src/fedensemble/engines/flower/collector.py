"""A round's answers as they come in: checked one by one, until the round has what it needs or time
is up.
"""

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
from .reply_validation import Answer
from .roster import Roster

Check = Callable[[Message, Visit], Answer]  # raises if the answer must not count


class Collected(NamedTuple):
    """What came of the messages of a round."""

    answers: dict[Visit, Answer]  # that have a place
    passed: set[int]  # clients whose answer passed the checks, whether it has a place or not
    failed: set[int]  # clients that were asked and did not answer, or whose answer was refused


class Collector:
    """Sends the messages of a round and collects the answers.

    Args:
        roster: the clients.
        seed: of the run.
        modes: K.
    """

    def __init__(
        self, roster: Roster, patience: RoundTimeout, clock: Clock, seed: int, modes: int
    ) -> None:
        self.roster, self.patience, self.clock, self.seed, self.modes = (
            roster,
            patience,
            clock,
            seed,
            modes,
        )
        self._overdue: list[tuple[float, Exchange, list[Visit]]] = []

    def collect(
        self, messages: list[Message], visits: list[Visit], check: Check, log: RoundLog
    ) -> Collected:
        """Answers that count, until all places are taken, or everybody has answered, or time is
        up.
        """
        deadline, failed = self.clock.now() + self.patience.timeout, set[int]()
        exchange, places, answers = (
            Exchange(self.roster.grid, messages),
            self._places(visits),
            dict[int, Answer](),
        )
        while exchange.waiting and not places.settled(exchange.waiting.values()):
            for index, message in exchange.look():
                if index is None:
                    log.add_stray(f"node {message.metadata.src_node_id}")
                    continue
                answer = self._judge(message, visits[index], check, log)
                if answer is None:
                    failed.add(visits[index].client)
                else:
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
                log.lose(self._name(visits[index]), f"no answer in {self.patience.timeout:g} s")
                failed.add(visits[index].client)
        for index in exchange.unsent:
            log.lose(self._name(visits[index]), "Flower could not take its message")
        log.surplus = [self._name(visits[index]) for index in sorted(unneeded)]
        log.forgot = [self._name(visits[index]) for index in taken if answers[index].forgot]
        log.late = self._late()
        self._overdue.append((deadline, exchange, visits))
        passed = {visits[index].client for index in answers}
        return Collected({visits[index]: answers[index] for index in taken}, passed, failed)

    def _places(self, visits: list[Visit]) -> ReplySlots:
        """The round's places, shared out among the modes as in a simulation."""
        mode = torch.tensor([visit.mode for visit in visits], dtype=torch.int64)
        asked = torch.bincount(mode, minlength=self.modes)
        keep = len(visits) if self.patience.keep is None else self.patience.keep
        return ReplySlots(
            mode, quotas(asked, keep, self.seed, visits[0].round) if visits else asked
        )

    def _judge(self, message: Message, visit: Visit, check: Check, log: RoundLog) -> Answer | None:
        """The answer in a message; None, and a line in the log, if there is none that counts."""
        if message.has_error():
            log.lose(self._name(visit), message.error.reason or f"error {message.error.code}")
            return None
        try:
            return check(message, visit)
        except UnreadableError as problem:
            reason = str(problem)
        except Exception as error:  # no answer, whatever it is made of, may stop the fleet
            reason = f"it cannot be checked: {type(error).__name__}"
        log.refuse(
            self._name(visit), f"{shorten(reason, 160)} (node {message.metadata.src_node_id})"
        )
        return None

    def _late(self) -> list[str]:
        """Whose answers to earlier rounds came in since; they are fetched only to be dropped."""
        names = [
            self._name(visits[place])
            for _, exchange, visits in self._overdue
            for place, message in exchange.look()
            if place is not None and message.has_content()
        ]
        # after their deadline messages are void, and Flower takes no answer to them
        now = self.clock.now()
        self._overdue = [entry for entry in self._overdue if entry[1].waiting and now < entry[0]]
        return names

    def _name(self, visit: Visit) -> str:
        return self.roster.members[visit.client].name
