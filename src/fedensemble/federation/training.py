"""Training and testing from Python: `rounds`, `train` and `evaluate` of a federation."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..arguments import require_integer
from ..client_metrics import ClientMetrics, evaluate_clients
from ..core.types import RoundReport
from ..data import FederatedData
from ..data.client_rows import NOBODY
from ..errors import InputError, UntrainedWarning
from ..metrics import evaluate, evaluate_modes
from ..prediction import Prediction
from .mode_bank import own_models
from .progress import progress_bar

if TYPE_CHECKING:
    from .federation import Federation

Callback = Callable[[RoundReport], Any]
_LAZY = (
    "rounds() trains lazily, and its iterator was thrown away before the first round: iterate "
    "over it, or call train({count})."
)


class Rounds(Iterator[RoundReport]):
    """Trains one round for each report that is taken; warns if none ever is.

    Args:
        federation: that is trained.
        count: number of rounds.
    """

    def __init__(self, federation: Federation, count: int) -> None:
        # Set first: `__del__` is also called if the check below raises.
        self._federation, self._left, self._unused = federation, 0, False
        self._left = require_integer("rounds()", "count", count)
        self._unused = self._left > 0

    def __next__(self) -> RoundReport:
        self._unused = False
        if self._left == 0:
            raise StopIteration
        started = time.perf_counter()
        try:
            report = self._federation.run_round()
        except BaseException:
            self._left = 0  # as a generator, which ends with the first error
            raise
        self._left -= 1
        self._federation.seconds += time.perf_counter() - started
        return report

    def __del__(self) -> None:
        if self._unused:
            warnings.warn(_LAZY.format(count=self._left), UntrainedWarning, stacklevel=2)


def train(
    federation: Federation, count: int, callback: Callback | None, test_every: int | None
) -> list[RoundReport]:
    """Trains `count` rounds with a progress bar; see `Federation.train`."""
    count = require_integer("train()", "count", count)
    if callback is not None and not callable(callback):
        raise InputError(f"train() needs callback to be a function of a report; got {callback!r}.")
    if test_every is not None:
        test_every = require_integer("train()", "test_every", test_every, minimum=1)
        _test_set(federation)
        federation.history.test_every = test_every
    reports: list[RoundReport] = []
    with progress_bar(count) as show:
        for report in Rounds(federation, count):
            reports.append(report)
            if test_every and (report.round % test_every == 0 or len(reports) == count):
                evaluate_federation(federation)
            show(federation.history.records)
            if callback is not None and callback(report) is True:
                break
    return reports


def evaluate_federation(
    federation: Federation,
    x: Any = None,
    y: Any = None,
    ood: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, float]:
    """All metrics of the current modes; see `Federation.evaluate`."""
    if (x is None) != (y is None):
        raise InputError("evaluate() needs both inputs and targets, or neither for the test set.")
    others = _predict_others(federation, {} if ood is None else ood, options)
    if x is not None:
        return evaluate(federation.predict(x, **options), y, ood=others)
    inputs, targets = _test_set(federation)
    prediction = (
        predict_test_rows(federation, **options)
        if federation.personal
        else federation.predict(inputs, **{**_test_clients(federation), **options})
    )
    metrics = evaluate(prediction, targets)
    # Metrics with dropout, for example, are no part of the usual curve, and neither are those after
    # calibration: its other points are without it.
    if not options and federation.calibration is None:
        _record_test(federation, prediction, metrics)
    elif not options and "test" not in (federation.history.tested_at(federation.round) or {}):
        before = federation.uncalibrated.predict(inputs)
        _record_test(federation, before, evaluate(before, targets))
    return evaluate(prediction, targets, ood=others) if others else metrics


def _predict_others(
    federation: Federation, ood: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Prediction]:
    """Predictions for inputs out of distribution, by name; an error says which of them it is."""
    if not isinstance(ood, Mapping):
        raise InputError(
            "evaluate() needs ood to be a dict of inputs by name, such as {'noise': noise}; got "
            f"{type(ood).__name__}."
        )
    predictions = {}
    for name, inputs in ood.items():
        try:
            predictions[str(name)] = federation.predict(inputs, **options)
        except InputError as error:
            raise InputError(f"ood['{name}']: {error}") from None
    return predictions


def _record_test(
    federation: Federation, prediction: Prediction, metrics: Mapping[str, float]
) -> None:
    """Adds a prediction for the test set, without calibration, to the history."""
    inputs, targets = _test_set(federation)
    tests: dict[str, Any] = {"test": metrics, "modes": evaluate_modes(prediction, targets)}
    # With an average, the modes as they are now are tested, too.
    if (last := federation.last_ensemble) is not None:
        tests["test_last"] = evaluate(last.predict(inputs), targets)
    tests |= evaluate_by_client(
        federation.data, prediction, lambda new: federation.uncalibrated.predict(new[0])
    )
    tests |= evaluate_own_models(federation)
    federation.history.add_test(federation.round, tests)


def evaluate_by_client(
    data: FederatedData,
    prediction: Prediction,
    predict: Callable[[tuple[Tensor, Tensor]], Prediction],
    publish: bool = True,
) -> dict[str, dict[str, float]]:
    """Summaries of the metrics of each client: "test_clients", and "test_new_clients" if any are.

    Both are left out if test rows belong to no client.

    Args:
        prediction: for the test set.
        predict: returns the prediction for other inputs, given inputs and targets.
        publish: whether values of single clients may be in the result.
    """
    tests = {}
    if data.test_owner is not None and bool((data.test_owner >= 0).any()):
        own = evaluate_clients(prediction, data.y_test, data.test_owner, len(data))
        tests["test_clients"] = own.summary(publish)
    new = data.new_clients
    if new is not None and new.x_test is not None and new.y_test is not None:
        seen = predict((new.x_test, new.y_test))
        tests["test_new_clients"] = evaluate_clients(
            seen, new.y_test, new.test_owner, len(new)
        ).summary(publish)
    return tests


def evaluate_own_models(
    federation: Federation, publish: bool = True, batch_size: int = 1024
) -> dict[str, dict[str, float]]:
    """The summary "test_own" of clients' own models on their test rows; empty without own models.

    Args:
        publish: whether values of single clients may be in the result.
        batch_size: inputs per forward pass.
    """
    data = federation.data
    owner = data.test_owner
    if not federation.algorithm.personal or owner is None or not bool((owner >= 0).any()):
        return {}
    x, y, owner = _rows_of_clients(data)
    prediction = own_models(federation).predict(x, owner, batch_size)
    own = evaluate_clients(prediction, y, owner, len(data))
    return {"test_own": own.summary(publish)}


def _rows_of_clients(data: FederatedData) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and owners of the test rows that belong to a client."""
    assert data.x_test is not None
    assert data.y_test is not None
    assert data.test_owner is not None
    known = data.test_owner >= 0
    return data.x_test[known], data.y_test[known], data.test_owner[known].cpu()


def predict_test_rows(federation: Federation, batch_size: int = 1024, **options: Any) -> Prediction:
    """The prediction for the test set, each row by the models of the client that it belongs to.

    Rows of no client are predicted with the initial personal parameters.
    """
    if options:
        raise InputError(
            f"Clients' own models predict without {', '.join(options)}, of which only the modes "
            "know."
        )
    x, _ = _test_set(federation)
    owner = federation.data.test_owner
    owner = torch.full((len(x),), NOBODY) if owner is None else owner.cpu()
    return own_models(federation).predict(x, owner, batch_size)


def evaluate_federation_clients(
    federation: Federation, *, new: bool, own: bool | None, **options: Any
) -> ClientMetrics:
    """Metrics of each client; see `Federation.evaluate_clients`."""
    data = federation.data.new_clients if new else federation.data
    if data is None:
        raise InputError(
            "These data have no new clients: hold some out with data.with_new_clients(0.1)."
        )
    x, y = data.x_test, data.y_test
    if x is None or y is None or data.test_owner is None:
        raise InputError(
            "The test rows of these data belong to no client: use partition(), or pass x_test, "
            "y_test and test_owner to FederatedData."
        )
    if own or (own is None and federation.personal and not new):
        if new:
            raise InputError(
                "New clients have no models of their own: make some with fe.personalize()."
            )
        prediction = predict_test_rows(federation, **options)
        return evaluate_clients(prediction, y, data.test_owner, len(data))
    options = {**({} if new else _test_clients(federation)), **options}
    return evaluate_clients(federation.predict(x, **options), y, data.test_owner, len(data))


def _test_clients(federation: Federation) -> dict[str, Any]:
    """The clients of the test rows, if prediction sets or intervals depend on them."""
    calibration, owner = federation.calibration, federation.data.test_owner
    by_client = calibration is not None and bool(calibration.client_thresholds)
    return {"client": owner} if by_client and owner is not None else {}


def _test_set(federation: Federation) -> tuple[Any, Any]:
    """The test inputs and targets of the data; raises without them."""
    x, y = federation.data.x_test, federation.data.y_test
    if x is None or y is None:
        raise InputError(
            "These data have no test set: pass x_test and y_test to FederatedData, or call "
            "evaluate(x, y) with your own."
        )
    return x, y
