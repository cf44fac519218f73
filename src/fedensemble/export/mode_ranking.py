"""The order in which modes are worth keeping: greedy selection on rows that trained no mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import InputError
from ..prediction import Combine
from ..uncertainty.targets import check_below, check_targets

if TYPE_CHECKING:
    from ..predict import Ensemble

_MIN_PROBABILITY = 1e-12  # of the true class, as in the NLL of `evaluate`
_BEST = "best:"
_TITLES = {"nll": "NLL", "accuracy": "accuracy", "mse": "MSE"}


@dataclass(frozen=True)
class ModeRanking:
    """The modes in the order of a greedy selection, and how good every prefix is.

    Args:
        order: all K modes; the first n of them are the ensemble of n modes.
        metrics: of each prefix, by name: "nll" and "accuracy", or "mse" for regression.
        rows: number of rows that they were computed from.
    """

    order: tuple[int, ...]
    metrics: tuple[dict[str, float], ...]
    rows: int

    def best(self, count: int) -> tuple[int, ...]:
        """The first `count` modes in ascending order."""
        if not 1 <= count <= len(self.order):
            raise InputError(
                f"The ensemble has {len(self.order)} modes, so that the best 1 to "
                f"{len(self.order)} of them can be selected; got {count}."
            )
        return tuple(sorted(self.order[:count]))

    def table(self) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
        """A header, and one row of text per prefix."""
        header = ("modes", "mode added", *(_TITLES[name] for name in self.metrics[0]))
        rows = tuple(
            (str(size), str(mode), *(f"{value:.4f}" for value in metrics.values()))
            for size, (mode, metrics) in enumerate(zip(self.order, self.metrics, strict=True), 1)
        )
        return header, rows

    def __str__(self) -> str:
        header, rows = self.table()
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        return "\n".join(
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in (header, *rows)
        )


def rank_modes(ensemble: Ensemble, x: Any, y: Any) -> ModeRanking:
    """Adds one mode after the other, each time the one that makes the ensemble best.

    Best is the lowest NLL, or for regression the lowest mean squared error; of equal modes, the
    one with the lower index. The first mode is the best one by itself. Greedy selection is not
    exhaustive: another subset of the same size may be better.
    """
    prediction = ensemble.predict(x)
    regression = prediction.task == "regression"
    target = check_targets(
        prediction.mean, y, regression=regression, class_names=prediction.class_names
    )
    if not regression:
        check_below(target, prediction.mean.shape[-1])
    modes = prediction.modes.double()
    by_logits = prediction.combine == "logits"
    if by_logits:  # log-probabilities are logits up to a constant, which softmax ignores
        modes = modes.clamp(min=torch.finfo(prediction.modes.dtype).tiny).log()
    order: list[int] = []
    prefixes: list[dict[str, float]] = []
    total = torch.zeros_like(modes[0])
    while len(order) < len(modes):
        tried = {
            mode: _evaluate((total + modes[mode]) / (len(order) + 1), target, prediction.combine)
            for mode in range(len(modes))
            if mode not in order
        }
        best = min(tried, key=lambda mode: next(iter(tried[mode].values())))
        order.append(best)
        prefixes.append(tried[best])
        total += modes[best]
    return ModeRanking(tuple(order), tuple(prefixes), len(prediction.mean))


def _evaluate(mean: Tensor, target: Tensor, combine: Combine) -> dict[str, float]:
    """Metrics of a mean over modes, [n, ..., C]; the first one is what selection minimizes."""
    if combine == "outputs":
        return {"mse": float(((mean - target.reshape(mean.shape)) ** 2).mean())}
    probabilities = (mean.softmax(-1) if combine == "logits" else mean).flatten(0, -2)
    labels = target.reshape(-1, 1).long()
    of_target = probabilities.gather(1, labels).clamp(min=_MIN_PROBABILITY)
    right = probabilities.argmax(-1, keepdim=True) == labels
    return {"nll": float(-of_target.log().mean()), "accuracy": float(right.double().mean())}


def choose_modes(
    ensemble: Ensemble, modes: str | Sequence[int] | None, validation: tuple[Any, Any] | None
) -> tuple[tuple[int, ...] | None, ModeRanking | None]:
    """The modes that `Ensemble.export(modes=...)` means, and the ranking that chose them.

    Both are None for all modes.
    """
    if modes is None:
        return None, None
    wanted = parse_modes(modes) if isinstance(modes, str) else tuple(modes)
    if isinstance(wanted, tuple):
        return wanted, None
    if not isinstance(validation, tuple) or len(validation) != 2:
        raise InputError(
            f"modes='{modes}' needs rows to choose by: validation=(x, y), which no mode was "
            "trained on and which are not those of the final test."
        )
    ranking = rank_modes(ensemble, *validation)
    return ranking.best(wanted), ranking


def parse_modes(text: str) -> int | tuple[int, ...]:
    """The number of modes in "best:3", or the modes in "0,2,4".

    >>> parse_modes("best:3"), parse_modes("0,2,4")
    (3, (0, 2, 4))
    """
    parts = text.removeprefix(_BEST).split(",")
    try:
        numbers = tuple(int(part) for part in parts)
    except ValueError:
        numbers = ()
    if not numbers or (text.startswith(_BEST) and len(numbers) > 1):
        raise InputError(
            f"modes are 'best:3' for the best three, or the numbers of some, '0,2,4'; got '{text}'."
        )
    return numbers[0] if text.startswith(_BEST) else numbers
