"""Training and testing from Python: `rounds`, `train` and `evaluate` of a federation."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..arguments import require_integer
from ..core.types import RoundReport
from ..errors import InputError, UntrainedWarning
from ..metrics import evaluate, evaluate_modes
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
    federation: Federation, x: Any = None, y: Any = None, **options: Any
) -> dict[str, float]:
    """All metrics of the current modes; see `Federation.evaluate`."""
    if (x is None) != (y is None):
        raise InputError("evaluate() needs both inputs and targets, or neither for the test set.")
    if x is not None:
        return evaluate(federation.predict(x, **options), y)
    inputs, targets = _test_set(federation)
    prediction = federation.predict(inputs, **options)
    metrics = evaluate(prediction, targets)
    if not options:  # metrics with dropout, for example, are no part of the usual curve
        tests = {"test": metrics, "modes": evaluate_modes(prediction, targets)}
        # With an average, the modes as they are now are tested, too.
        if (last := federation.last_ensemble) is not None:
            tests["test_last"] = evaluate(last.predict(inputs), targets)
        federation.history.add_test(federation.round, tests)
    return metrics


def _test_set(federation: Federation) -> tuple[Any, Any]:
    """The test inputs and targets of the data; raises without them."""
    x, y = federation.data.x_test, federation.data.y_test
    if x is None or y is None:
        raise InputError(
            "These data have no test set: pass x_test and y_test to FederatedData, or call "
            "evaluate(x, y) with your own."
        )
    return x, y
