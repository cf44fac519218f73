"""Tests a run's ensemble, and keeps what its report shows of the predictions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ..config.schema import Config
from ..data import FederatedData
from ..federation.federation import Federation
from ..metrics import evaluate, evaluate_modes
from ..predict import Prediction
from ..runtime.oom import raise_on_oom
from .prediction_summary import compact_bytes, describe_predictions
from .run_folder import RunFolder

# the batch size of the authors' test loaders, whose statistics BatchNorm takes in train mode
AUTHORS_BATCH = 16
_ON_DEVICE = 100_000_000  # numbers of a prediction that are judged where they are


def test(
    config: Config, federation: Federation, data: FederatedData
) -> tuple[dict[str, Any], Prediction | None]:
    """Metrics on the test set, by the way of testing, and the prediction without dropout; empty
    without a test set.
    """
    if data.x_test is None or data.y_test is None:
        return {}, None
    x, y = data.x_test, data.y_test
    with raise_on_oom(
        "Evaluation does",
        federation.learner.device,
        "use fewer test examples, or a larger card or machine",
    ):
        prediction = _predict(config, federation, x, y)
        found: dict[str, Any] = {
            "test": evaluate(prediction, y),
            "modes": evaluate_modes(prediction, y),
        }
        if config.evaluation.dropout:
            found["test_dropout"] = evaluate(_predict(config, federation, x, y, dropout=True), y)
        return found, prediction


def keep_predictions(
    config: Config,
    store: RunFolder,
    federation: Federation,
    data: FederatedData,
    prediction: Prediction | None,
) -> None:
    """Writes what the report shows of the predictions for the test set, so that it needs no data
    and no model.
    """
    if data.x_test is not None and data.y_test is not None:
        found = prediction or _predict(config, federation, data.x_test, data.y_test)
        found = replace(found, mean=found.mean.cpu(), members=found.members.cpu())
        described = describe_predictions(found, data.y_test, config.report.publish_targets)
        store.write(store.predictions_file, compact_bytes(described))


def _predict(
    config: Config, federation: Federation, x: Tensor, y: Tensor, dropout: bool = False
) -> Prediction:
    """What the modes say of the test set; left on the device where that is small."""
    ensemble, size = federation.ensemble, config.evaluation.batch_size
    # The authors' way of testing is train mode. Without BatchNorm that is dropout alone, whatever
    # the batch size is.
    in_train_mode = dropout and federation.learner.has_batch_statistics and len(x) > 1
    size = max(2, min(size, AUTHORS_BATCH)) if in_train_mode else size
    small = ensemble.prediction_models * y.numel() * (federation.data.classes or 1) <= _ON_DEVICE
    return ensemble.predict(
        x, batch_size=size, dropout=dropout, batch_statistics=in_train_mode, on_device=small
    )
