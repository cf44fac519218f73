"""The server's part of a fleet's personal models: sends the modes once, and adds up the answers."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.parameters.shared import Shared
from ..engines.flower.deadline import RoundTimeout
from ..engines.flower.exchange import Clock
from ..engines.flower.messages import pack
from ..engines.flower.roster import Roster
from ..errors import InputError
from ..modeling.functional_model import FunctionalModel
from ..personal.settings import TRAINING, PersonalSettings
from ..predict import Ensemble
from ..uncertainty.calibration_client import Answer, answer_bytes
from .calibration_messages import (
    CENTER,
    CENTER_STATISTICS,
    LABELS,
    MODE_LOSSES,
    MOST_SUM,
    PERSONAL_KIND,
    PREDICTORS,
    ROWS,
    STATISTICS,
    SUMS_OF,
    WEIGHTS,
    Session,
)
from .fleet_calibration import FleetClients

ALL_MODES = "all modes"  # with equal weights, in the metrics


@dataclass(frozen=True)
class PersonalRequest:
    """What clients are asked for.

    Args:
        settings: of each method.
        share: `data.calibration`, which limits the rows that a client can have.
        largest: number of examples of the largest client.
        publish: whether the server learns and publishes the weights of single clients.
        fewest: number of clients with rows without which no metrics are published.
        regression: whether the loss is a squared error.
    """

    settings: Sequence[PersonalSettings]
    share: float
    largest: int
    publish: bool
    fewest: int
    regression: bool

    @property
    def methods(self) -> list[str]:
        """Names of the methods, each once."""
        return list(dict.fromkeys(settings.method for settings in self.settings))

    @property
    def trains(self) -> bool:
        """Whether a method trains on the clients."""
        return any(method in TRAINING for method in self.methods)


def check_heads(settings: Sequence[PersonalSettings], model: FunctionalModel) -> None:
    """Raises InputError if a pattern of "head" fits no parameter, before anything is trained."""
    for each in settings:
        if each.head:
            Shared.of(each.head, model.theta_layout, model.buffer_layout, "personalize.head")


def personalize_fleet(
    ensemble: Ensemble,
    request: PersonalRequest,
    roster: Roster,
    training: str,
    timeout: RoundTimeout,
    clock: Clock | None = None,
) -> dict[str, Any]:
    """Makes personal models on the clients that are online; returns what the summary says of them.

    Args:
        ensemble: without a calibration.
        request: what clients are asked for.
        roster: the clients.
        training: id of the training job.
        timeout: how long to wait for answers.
        clock: time source.
    """
    session = Session(training, secrets.token_hex(8))
    fleet = FleetClients(roster, session, len(ensemble), timeout, clock, "personalize")
    query = {
        "kind": PERSONAL_KIND,
        "methods": request.methods,
        "ask_losses": request.trains,
        "ask_weights": request.publish,
        "largest": request.largest,
    }
    tensors = _tensors(ensemble, request)
    everybody = {client: {"client": client, "start": -1} for client in range(len(roster))}
    answers = _keep_possible(
        fleet, request, len(ensemble), fleet.exchange(query, everybody, pack(tensors))
    )
    if not answers:
        raise InputError("no client answers")
    bytes_up = sum(answer_bytes(answer) for answer in answers.values())
    sent = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    without = {client for client, answer in answers.items() if not int(answer[ROWS])}
    if request.trains and without:
        # They start from the mode that is best on the rows of all clients, and have the modes.
        losses = torch.stack([answer[MODE_LOSSES] for _, answer in sorted(answers.items())])
        start = int(losses.sum(0).argmin())
        again = {client: {"client": client, "start": start} for client in sorted(without)}
        late = _keep_possible(fleet, request, len(ensemble), fleet.exchange(query, again))
        bytes_up += sum(answer_bytes(answer) for answer in late.values())
        answers |= late
    return {
        **_summarize(answers, request, [member.name for member in roster.members]),
        "bytes_up": bytes_up,
        "bytes_down": sent * len(answers),
    }


def _tensors(ensemble: Ensemble, request: PersonalRequest) -> dict[str, Tensor]:
    """The tensors that are sent to each client."""
    tensors = {PREDICTORS: ensemble.predictors, STATISTICS: ensemble.predictor_buffers}
    if request.trains and ensemble.predictors.shape[1] > 1:
        tensors |= {CENTER: ensemble.theta, CENTER_STATISTICS: ensemble.buffers}
    return {name: tensor for name, tensor in tensors.items() if tensor.numel()}


def _keep_possible(
    fleet: FleetClients, request: PersonalRequest, modes: int, answers: Mapping[int, Answer]
) -> dict[int, Answer]:
    """The answers whose values are possible, in the order of clients; others are logged."""
    kept = {}
    for client, answer in sorted(answers.items()):
        rows, labels = int(answer[ROWS]), int(answer[LABELS])
        if not fleet.may_have(client, rows, labels, request.share):
            continue
        sums, weights = answer[SUMS_OF], answer.get(WEIGHTS)
        losses = torch.cat([sums[:, 0], answer.get(MODE_LOSSES, sums[:0, 0])])
        if bool((sums[:, 1] < 0).any()) or bool((sums[:, 1] > labels).any()):
            fleet.log(client, f"it counts more correct labels than the {labels} it has")
        elif bool((losses.abs() > MOST_SUM * labels).any()):
            fleet.log(client, f"it has sums of losses that {labels} labels cannot have")
        elif weights is not None and not _are_weights(weights, modes):
            fleet.log(client, "its weights of modes are not between 0 and 1")
        else:
            kept[client] = answer
    return kept


def _are_weights(weights: Tensor, modes: int) -> bool:
    """Whether rows are weights of modes; those of a model that is not made yet are zeros."""
    total = weights.sum(1)
    one_or_none = ((total - 1).abs() < 1e-6) | (total == 0)
    return weights.shape[1] == modes and bool((weights >= 0).all() and one_or_none.all())


def _summarize(
    answers: Mapping[int, Answer], request: PersonalRequest, names: Sequence[str]
) -> dict[str, Any]:
    """Number of clients and rows, and the metrics of each method on the clients' own rows."""
    clients = sorted(answers)
    rows = sum(int(answers[client][ROWS]) for client in clients)
    labels = sum(int(answers[client][LABELS]) for client in clients)
    with_rows = [client for client in clients if int(answers[client][ROWS])]
    found: dict[str, Any] = {
        "clients": len(clients),
        "without_rows": len(clients) - len(with_rows),
        "rows": rows,
    }
    # A mean over few clients would tell about single ones.
    if len(with_rows) >= max(request.fewest, 1):
        sums = torch.stack([answers[client][SUMS_OF] for client in clients])
        mean = (sums.sum(0) / labels).tolist()
        metrics = ("mse",) if request.regression else ("nll", "accuracy")
        found["validation"] = {
            method: dict(zip(metrics, values, strict=False))
            for method, values in zip([ALL_MODES, *request.methods], mean, strict=True)
        }
    if request.publish:
        found["weights"] = {
            method: {names[client]: answers[client][WEIGHTS][row].tolist() for client in clients}
            for row, method in enumerate(request.methods)
        }
    return found
