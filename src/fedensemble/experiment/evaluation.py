"""Evaluates a run's ensemble on the test set, and summarizes its predictions for the report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from ..client_metrics import evaluate_clients
from ..config.schema import Config
from ..data import FederatedData
from ..federation.federation import Federation
from ..federation.training import evaluate_by_client, evaluate_own_models, predict_test_rows
from ..metrics import evaluate, evaluate_modes
from ..modeling.functional_model import FunctionalModel
from ..predict import Ensemble
from ..prediction import Prediction
from ..runtime.oom import raise_on_oom
from ..uncertainty.calibration import Calibration
from .prediction_summary import compact_bytes, describe_predictions
from .storage.run_folder import RunFolder
from .uncertainty_summary import (
    describe_ood,
    describe_sets,
    describe_unsure,
    load_ood,
    shows_inputs,
)

# The batch size of the paper's test loaders. It matters for BatchNorm in train mode, which
# normalizes with the statistics of the test batch.
AUTHORS_BATCH = 16
# Keys of the metrics that `evaluate_run` returns, in the record of a round with a test.
TEST_KEYS = (
    "test",
    "modes",
    "test_last",
    "test_dropout",
    "test_clients",
    "test_new_clients",
    "test_own",
)
# Predictions with up to this number of elements stay on the device while metrics are computed.
_MAX_ELEMENTS_ON_DEVICE = 100_000_000


class Trained(Protocol):
    """What is evaluated: a Federation, or the server of a fleet."""

    model: FunctionalModel

    @property
    def ensemble(self) -> Ensemble:
        """The models that predict."""
        ...

    @property
    def last_ensemble(self) -> Ensemble | None:
        """The modes in their current state; None if they are `ensemble`."""
        ...


class EvaluationData(Protocol):
    """What an ensemble is evaluated on: FederatedData, or the test set of a fleet's server."""

    @property
    def x_test(self) -> Tensor | None:
        """Inputs, or None without a test set."""
        ...

    @property
    def y_test(self) -> Tensor | None:
        """Targets, or None without a test set."""
        ...

    @property
    def classes(self) -> int | None:
        """Number of classes; None for regression."""
        ...


def evaluate_run(
    config: Config, federation: Trained, data: EvaluationData
) -> tuple[dict[str, Any], Prediction | None]:
    """Returns metrics on the test set and the prediction; ({}, None) without a test set.

    The metrics are "test" (ensemble), "modes" (each mode), with an average "test_last" (the current
    modes without it), if the config asks for it, "test_dropout" (ensemble with dropout enabled),
    and if test rows belong to clients, "test_clients" and "test_new_clients", and for clients with
    models of their own "test_own". The prediction is that of "test". With personal parameters, the
    owner of each row predicts it.
    """
    if data.x_test is None or data.y_test is None:
        return {}, None
    x, y = data.x_test, data.y_test
    with raise_on_oom(
        "Evaluation does",
        federation.model.device,
        "use fewer test examples, or a GPU or host with more memory",
    ):
        ensemble, last = federation.ensemble, federation.last_ensemble
        own = federation if isinstance(federation, Federation) else None
        prediction = (
            predict_test_rows(own, config.evaluation.batch_size)
            if own is not None and own.personal
            else _predict(config, ensemble, x, y, data.classes)
        )
        metrics: dict[str, Any] = {
            "test": evaluate(prediction, y),
            "modes": evaluate_modes(prediction, y),
        }
        if last is not None:
            metrics["test_last"] = evaluate(_predict(config, last, x, y, data.classes), y)
        if config.evaluation.dropout:
            with_dropout = _predict(config, ensemble, x, y, data.classes, dropout=True)
            metrics["test_dropout"] = evaluate(with_dropout, y)
        if isinstance(data, FederatedData):
            metrics |= evaluate_by_client(
                data,
                prediction,
                lambda new: _predict(config, ensemble, *new, data.classes),
                config.report.publish_clients,
            )
        if own is not None:
            metrics |= evaluate_own_models(
                own, config.report.publish_clients, config.evaluation.batch_size
            )
        return metrics, prediction


def calibration_facts(made: Calibration | None) -> dict[str, Any]:
    """Returns temperatures, method, rows and bytes of a calibration; empty without one."""
    if made is None:
        return {}
    return {
        "rows": made.rows,
        "clients": made.clients,
        "temperature": made.place or "none",
        "temperatures": list(made.temperatures),
        "nll": list(made.nll),
        "method": made.settings.method,
        "alpha": made.settings.alpha,
        "scope": made.settings.scope,
        "bytes_up": made.bytes_up,
        "bytes_down": made.bytes_down,
    }


def describe_calibration(
    config: Config, ensemble: Ensemble, data: EvaluationData
) -> tuple[dict[str, Any], Prediction | None]:
    """Returns what the summary says of an ensemble's calibration, and the test prediction with it.

    Besides the temperatures, the rows and the bytes, it has "test", the metrics on the test set
    after calibration, and "test_clients", those of each client, if test rows belong to clients.

    Args:
        config: of the run.
        ensemble: that is calibrated.
        data: with the test set, or without one.
    """
    made = ensemble.calibration
    summary: dict[str, Any] = calibration_facts(made)
    if data.x_test is None or data.y_test is None:
        return summary, None
    owner = data.test_owner if isinstance(data, FederatedData) else None
    client = owner if made is not None and made.client_thresholds else None
    prediction = _predict(config, ensemble, data.x_test, data.y_test, data.classes, client=client)
    summary["test"] = evaluate(prediction, data.y_test)
    if isinstance(data, FederatedData) and owner is not None and bool((owner >= 0).any()):
        of_clients = evaluate_clients(prediction, data.y_test, owner, len(data))
        summary["test_clients"] = of_clients.summary(config.report.publish_clients)
    return summary, prediction


def write_prediction_summary(
    config: Config,
    store: RunFolder,
    ensemble: Ensemble,
    data: EvaluationData,
    prediction: Prediction | None,
) -> None:
    """Writes predictions.json, so that the report needs neither data nor model.

    Args:
        config: of the run.
        store: folder of the run.
        ensemble: after the last round.
        data: with the test set; without one, nothing is written.
        prediction: for the test set; None to compute it here.
    """
    if data.x_test is not None and data.y_test is not None:
        prediction = prediction or _predict(
            config, ensemble, data.x_test, data.y_test, data.classes
        )
        energy = prediction.member_energy
        on_cpu = replace(
            prediction,
            mean=prediction.mean.cpu(),
            members=prediction.members.cpu(),
            member_energy=None if energy is None else energy.cpu(),
        )
        summary = describe_predictions(on_cpu, data.y_test, config.report.publish_targets)
        summary |= _describe_uncertainty(config, ensemble, data, on_cpu)
        store.write(store.predictions_file, compact_bytes(summary))


def _describe_uncertainty(
    config: Config, ensemble: Ensemble, data: EvaluationData, prediction: Prediction
) -> dict[str, Any]:
    """Returns what predictions.json says of sets, inputs out of distribution and unsure examples.

    Args:
        prediction: for the test set, on the CPU.
    """
    x, y = data.x_test, data.y_test
    if x is None or y is None:
        return {}
    of_clients = data if isinstance(data, FederatedData) else None
    parts: dict[str, Any] = {
        "sets": describe_sets(
            prediction,
            y.cpu(),
            None if of_clients is None else of_clients.test_owner,
            None if of_clients is None else of_clients.names,
            config.report.publish_clients,
        )
    }
    if of_clients is not None and config.evaluation.ood and prediction.task == "classification":
        others = load_ood(config.evaluation.ood, of_clients)
        parts["ood"] = describe_ood(prediction, others, ensemble, config.evaluation.batch_size)
    if shows_inputs(config.report.publish_inputs, data):
        parts["unsure"] = describe_unsure(prediction, y.cpu(), x.cpu())
    return {name: part for name, part in parts.items() if part}


def _predict(
    config: Config,
    ensemble: Ensemble,
    x: Tensor,
    y: Tensor,
    classes: int | None,
    dropout: bool = False,
    client: Tensor | None = None,
) -> Prediction:
    """Returns the prediction for the test set; small ones stay on the device."""
    batch_size = config.evaluation.batch_size
    # The paper's code evaluates in train mode: dropout is on, and BatchNorm normalizes with the
    # statistics of the test batch, so the batch size changes the result. Without BatchNorm only
    # dropout differs, and the batch size does not matter.
    in_train_mode = dropout and ensemble.model.has_batch_statistics and len(x) > 1
    if in_train_mode:
        batch_size = max(2, min(batch_size, AUTHORS_BATCH))
    elements = ensemble.prediction_models * y.numel() * (classes or 1)
    return ensemble.predict(
        x,
        batch_size=batch_size,
        dropout=dropout,
        batch_statistics=in_train_mode,
        on_device=elements <= _MAX_ELEMENTS_ON_DEVICE,
        client=client,
    )
