"""Calibrates a federation's ensemble by the clients' calibration rows, as real clients would."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..data.client_rows import ClientRows
from ..errors import InputError, UntrainedWarning
from ..predict import Ensemble
from ..uncertainty.calibration import Calibration
from ..uncertainty.calibration_client import (
    Answer,
    CalibrationClient,
    Query,
    answer_bytes,
    query_bytes,
    rows_salt,
)
from ..uncertainty.calibration_server import CalibrationFacts, fit_calibration
from ..uncertainty.calibration_settings import CalibrationSettings

if TYPE_CHECKING:
    from ..data.federated import FederatedData
    from .federation import Federation


class SimulatedClients:
    """The clients with calibration rows; counts the bytes that real clients would exchange.

    Args:
        outputs: of all models for the rows, [K, S, n, ..., C].
        rows: of all clients.
        by_logits: whether the ensemble averages logits.
        seed: of the run.
    """

    def __init__(self, outputs: Tensor, rows: ClientRows, by_logits: bool, seed: int) -> None:
        self._clients = {}
        for client in sorted(set(rows.owner.tolist())):
            own = rows.owner == client
            self._clients[client] = CalibrationClient(
                outputs[:, :, own],
                rows.y[own],
                by_logits,
                seed,
                rows_salt(rows.x[own.to(rows.x.device)]),
            )
        self.bytes_up = self.bytes_down = 0

    @property
    def rows(self) -> Mapping[int, int]:
        """Number of calibration rows of each client that has some."""
        return {index: len(client.target) for index, client in self._clients.items()}

    def ask(self, query: Query) -> Mapping[int, Answer]:
        """The answer of each client to a query."""
        answers = {index: client.answer(query) for index, client in self._clients.items()}
        self.bytes_up += sum(answer_bytes(answer) for answer in answers.values())
        self.bytes_down += query_bytes(query) * len(answers)
        return answers


def calibrate(federation: Federation, settings: CalibrationSettings) -> Calibration:
    """The calibration of a federation's current modes; see `Federation.calibrate`."""
    data = federation.data
    rows = calibration_rows(data)
    return calibrate_ensemble(
        federation.uncalibrated, rows, settings, len(data), data.names, federation.seed
    )


def calibrate_ensemble(
    ensemble: Ensemble,
    rows: ClientRows,
    settings: CalibrationSettings,
    clients: int,
    names: Sequence[str] | None,
    seed: int,
) -> Calibration:
    """The calibration of an ensemble by rows of clients, as if each of them were a real client.

    Args:
        ensemble: without a calibration.
        rows: that no mode was trained on.
        settings: what is calibrated, and how.
        clients: number of clients, also of those without rows.
        names: of the clients, or None.
        seed: of the run.
    """
    outputs = ensemble.outputs(rows.x).cpu()
    made, exchange = _fit(ensemble, outputs, rows, settings, clients, names, seed)
    # The models are sent once: clients keep their outputs between queries.
    models = ensemble.prediction_bytes * len(exchange.rows)
    return replace(made, bytes_up=exchange.bytes_up, bytes_down=exchange.bytes_down + models)


def check_calibration(federation: Federation, settings: CalibrationSettings) -> None:
    """Raises if a federation cannot be calibrated after its training, before it is trained.

    Everything but the outputs of the models is known: the task, the classes, and how many rows each
    client and each class has. Outputs of 0 take their place.
    """
    data, ensemble = federation.data, federation.uncalibrated
    rows = calibration_rows(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntrainedWarning)
        one = ensemble.outputs(rows.x[:1]).cpu()
    zeros = one[:1, :1].new_zeros(()).expand(1, 1, len(rows), *one.shape[3:])
    _fit(ensemble, zeros, rows, settings, len(data), data.names, federation.seed)


def calibration_rows(data: FederatedData) -> ClientRows:
    """The rows of clients that are not trained on; raises if there are none."""
    if data.calibration is None or not len(data.calibration):
        raise InputError(
            "calibrate() needs rows that were not trained on, and these data have none: make them "
            "with FederatedData.with_calibration(0.1) before training, or set data.calibration."
        )
    return data.calibration


def _fit(
    ensemble: Ensemble,
    outputs: Tensor,
    rows: ClientRows,
    settings: CalibrationSettings,
    clients: int,
    names: Sequence[str] | None,
    seed: int,
) -> tuple[Calibration, SimulatedClients]:
    """The calibration by outputs for the rows, [K, S, n, ..., C], and the clients it asked."""
    rows = replace(rows, y=rows.y.cpu(), owner=rows.owner.cpu())
    exchange = SimulatedClients(outputs, rows, ensemble.combine == "logits", seed)
    facts = calibration_facts(ensemble, outputs, rows.y, clients, names)
    return fit_calibration(exchange, settings, facts), exchange


def calibration_facts(
    ensemble: Ensemble, outputs: Tensor, target: Tensor, clients: int, names: Any
) -> CalibrationFacts:
    """What the server knows about the ensemble and the clients.

    Args:
        ensemble: that is calibrated.
        outputs: of all models, [K, S, n, ...].
        target: of the rows, [n, ...].
        clients: number of clients.
        names: of the clients, or None.
    """
    regression = ensemble.model.task == "regression"
    per_row = outputs[0, 0].reshape(outputs.shape[2], -1).shape[1]
    return CalibrationFacts(
        ensemble.model.task,
        len(ensemble),
        per_row if regression else outputs.shape[-1],
        target.reshape(len(target), -1).shape[1] == 1 if regression else target.dim() == 1,
        clients,
        ensemble.class_names,
        names,
    )
