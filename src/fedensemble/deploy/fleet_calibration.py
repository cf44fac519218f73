"""The server's part of a fleet's calibration: sends the models, asks queries, checks answers."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from flwr.app import Message

from ..engines.flower.deadline import RoundTimeout
from ..engines.flower.exchange import Clock, Exchange
from ..engines.flower.messages import UnreadableError, pack, unpack
from ..engines.flower.roster import Roster
from ..errors import InputError
from ..predict import Ensemble
from ..text import shorten
from ..uncertainty.calibration import Calibration
from ..uncertainty.calibration_client import Answer, Query, answer_bytes, query_bytes
from ..uncertainty.calibration_server import CalibrationFacts, fit_calibration
from ..uncertainty.calibration_settings import CalibrationSettings
from .calibration_messages import (
    LABELS,
    MODELS_KIND,
    PREDICTORS,
    ROWS,
    STATISTICS,
    Session,
    build_query,
    check_answer,
    expected_answer,
    read_problem,
)

logger = logging.getLogger("flwr")


class ClientLostError(Exception):
    """A client that answered before answers no more: sums over other clients would not fit."""


class FleetClients:
    """The clients of a fleet that have calibration rows; counts the bytes that are sent.

    Args:
        roster: the clients.
        session: what the queries belong to.
        modes: number of modes.
        timeout: how long to wait for answers.
        clock: time source.
        purpose: first word of the lines that are logged about clients.
    """

    def __init__(
        self,
        roster: Roster,
        session: Session,
        modes: int,
        timeout: RoundTimeout,
        clock: Clock | None = None,
        purpose: str = "calibration",
    ) -> None:
        self.roster, self.session, self.modes, self.timeout = roster, session, modes, timeout
        self.clock, self.purpose = clock or Clock(), purpose
        self.bytes_up = self.bytes_down = 0
        self._claims: dict[int, tuple[int, int]] = {}  # rows and labels, by client

    @property
    def rows(self) -> Mapping[int, int]:
        """Number of calibration rows of each client that has some, by its index."""
        return {client: rows for client, (rows, _) in self._claims.items()}

    def send_models(self, ensemble: Ensemble, share: float) -> None:
        """Sends all models to all clients that are online; those that answer are asked later.

        Args:
            ensemble: without a calibration.
            share: `data.calibration`, which limits the rows that a client can have.
        """
        tensors = {PREDICTORS: ensemble.predictors, STATISTICS: ensemble.predictor_buffers}
        tensors = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
        query = {"kind": MODELS_KIND}
        answers = self.exchange(query, dict.fromkeys(range(len(self.roster))), pack(tensors))
        for client, answer in answers.items():
            rows, labels = int(answer[ROWS]), int(answer[LABELS])
            if self.may_have(client, rows, labels, share) and rows:
                self._claims[client] = rows, labels
        sent = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        self.bytes_down += sent * len(answers)

    def may_have(self, client: int, rows: int, labels: int, share: float) -> bool:
        """Whether a client can have as many calibration rows as it claims; logs it if not."""
        # A client of n rows holds back round(share * n) and was enrolled with the others.
        examples = self.roster.members[client].examples
        most = math.ceil(share / (1 - share) * (examples + 1)) + 1
        possible = 0 <= rows <= min(most, labels)
        if not possible:
            self.log(client, f"it claims {rows} calibration rows; {most} are possible")
        return possible

    def ask(self, query: Query) -> Mapping[int, Answer]:
        """The answer of each client to a query, in the order of clients.

        Raises ClientLostError if one does not answer as before; it is not asked any more.
        """
        answers = self.exchange(query, dict.fromkeys(self._claims))
        lost = [client for client in self._claims if client not in answers]
        for client in lost:
            del self._claims[client]
        if lost:
            raise ClientLostError
        self.bytes_up += sum(answer_bytes(answer) for answer in answers.values())
        self.bytes_down += query_bytes(query) * len(answers)
        return {client: answers[client] for client in sorted(answers)}

    def exchange(
        self, query: Query, clients: Mapping[int, Query | None], models: Any = None
    ) -> dict[int, Answer]:
        """Sends a query; returns the valid answers that arrive in time, by client.

        Args:
            query: to all of them.
            clients: that are asked, with what each is told in addition.
            models: record of the models, or None.
        """
        seconds = self.timeout.timeout
        nodes = self.roster.find_nodes(seconds)
        asked = [client for client in clients if client in nodes]
        messages = [
            build_query(
                self.session, {**query, **(clients[client] or {})}, nodes[client], seconds, models
            )
            for client in asked
        ]
        deadline = self.clock.now() + seconds
        exchange, answers = Exchange(self.roster.grid, messages), dict[int, Answer]()
        while True:
            for index, message in exchange.poll():
                if index is not None and (answer := self._read(message, query, asked[index])):
                    answers[asked[index]] = answer
            if not exchange.waiting or self.clock.now() >= deadline:
                break
            self.clock.sleep(min(self.timeout.poll, max(deadline - self.clock.now(), 0.01)))
        for index in exchange.waiting.values():
            self.log(asked[index], f"no answer in {seconds:g} s")
        return answers

    def _read(self, message: Message, query: Query, client: int) -> Answer | None:
        """Returns the answer in a message; logs why and returns None if it is not valid."""
        try:
            if message.has_error():
                raise UnreadableError(message.error.reason or f"error {message.error.code}")
            if (problem := read_problem(message.content)) is not None:
                raise UnreadableError(problem)
            answer = unpack(message.content, "upload", expected_answer(query, self.modes))
            check_answer(query, answer, *self._claims.get(client, (2**31, 2**31)))
        except UnreadableError as error:
            self.log(client, str(error))
            return None
        except Exception as error:  # untrusted input: no exception may stop the server
            self.log(client, f"it cannot be checked: {type(error).__name__}")
            return None
        return answer

    def log(self, client: int, reason: str) -> None:
        """Logs why the answer of a client does not count."""
        name = shorten(self.roster.members[client].name)
        logger.warning("%s: %s does not count: %s", self.purpose, name, shorten(reason, 200))


def calibrate_fleet(
    ensemble: Ensemble,
    settings: CalibrationSettings,
    roster: Roster,
    training: str,
    timeout: RoundTimeout,
    *,
    share: float,
    fewest: int,
    clock: Clock | None = None,
) -> Calibration:
    """Calibrates an ensemble by the rows of a fleet's clients; raises InputError if it cannot.

    If a client is lost, all sums are asked again, without it.

    Args:
        ensemble: without a calibration.
        settings: what is calibrated, and how.
        roster: the clients.
        training: id of the training job.
        timeout: how long to wait for answers.
        share: `data.calibration`.
        fewest: number of clients without which nothing is calibrated.
        clock: time source.
    """
    session = Session(training, secrets.token_hex(8))
    clients = FleetClients(roster, session, len(ensemble), timeout, clock)
    clients.send_models(ensemble, share)
    facts = _facts(ensemble, roster)
    while True:
        if len(clients.rows) < fewest:
            raise InputError(
                f"{len(clients.rows)} clients with calibration rows answer, and at least {fewest} "
                "are needed (min-cohort)"
            )
        try:
            made = fit_calibration(clients, settings, facts)
        except ClientLostError:
            continue
        return replace(made, bytes_up=clients.bytes_up, bytes_down=clients.bytes_down)


def _facts(ensemble: Ensemble, roster: Roster) -> CalibrationFacts:
    """What the server knows about the ensemble and the clients."""
    # The server has no rows: one of zeros tells the shape of the outputs.
    dtype = torch.int64 if ensemble.tokens else ensemble.model.dtype
    outputs = ensemble.outputs(torch.zeros(1, *(ensemble.input_shape or ()), dtype=dtype))
    regression = ensemble.model.task == "regression"
    per_row = outputs[0, 0].numel()
    return CalibrationFacts(
        ensemble.model.task,
        len(ensemble),
        per_row if regression else outputs.shape[-1],
        per_row == 1 if regression else outputs[0, 0].dim() == 2,
        len(roster),
        ensemble.class_names,
        [member.name for member in roster.members],
    )
