"""The contract of an average: it is for prediction only, exact to resume, and idle modes wait."""

from __future__ import annotations

import torch
from torch import Tensor

from ..algorithms import FedAvg
from ..core.average import Average
from ..flat_params import Tree
from .assertions import require, require_equal, snapshot
from .toy_problems import SEED, numbers, small_federation, train

_MODES, _PARAMETERS, _BUFFERS, _ROUNDS = 3, 7, 2, 12
_LR = 0.1


def check_average(average: Average) -> None:
    """Raises AssertionError if the average breaks a contract; the message says which.

    >>> from fedensemble import EMA
    >>> check_average(EMA(decay=0.5))
    """
    check_state(average)
    check_modes_are_separate(average)
    check_idle_modes(average)
    check_training(average)


def check_state(average: Average) -> None:
    """Checks shapes and dtypes, and that arguments are not written to and values are functions."""
    theta, buffers = _models(0)
    state = average.init(theta, buffers)
    form = {name: (value.shape, value.dtype) for name, value in state.items()}
    for round in range(_ROUNDS):
        theta, buffers = _models(round)
        trained = torch.ones(_MODES, dtype=torch.bool)
        copies = snapshot(state, {"theta": theta, "buffers": buffers, "trained": trained})
        new = average.update(state, theta, buffers, trained, round, _LR)
        again = average.update(state, theta, buffers, trained, round, _LR)
        require_equal(again, new, "Two equal calls of update differ")
        arguments = {"theta": theta, "buffers": buffers, "trained": trained}
        require_equal(snapshot(state, arguments), copies, "update wrote to an argument")
        found = {name: (value.shape, value.dtype) for name, value in new.items()}
        require(found == form, f"update changes names, shapes or dtypes: {found}, before {form}.")
        rows = {name: len(value) for name, value in new.items()}
        require(
            set(rows.values()) <= {_MODES},
            f"Tensors of the state need one row for each of {_MODES} modes; got {rows}.",
        )
        state = new
        _check_predictors(average, state, theta, buffers)


def _check_predictors(average: Average, state: Tree, theta: Tensor, buffers: Tensor) -> None:
    copies = snapshot(state, {"theta": theta, "buffers": buffers})
    found = average.predictors(state, theta, buffers, SEED)
    again = average.predictors(state, theta, buffers, SEED)
    require_equal(again._asdict(), found._asdict(), "Two equal calls of predictors differ")
    samples = found.theta.shape[1]
    shapes = tuple(found.theta.shape), tuple(found.buffers.shape)
    require(
        shapes[0] == (_MODES, samples, _PARAMETERS)
        and shapes[1] in {(_MODES, count, _BUFFERS) for count in (1, samples)},
        f"predictors have shapes {shapes}; expected [K, S, P] and [K, S, R] or [K, 1, R], with "
        f"K = {_MODES}, P = {_PARAMETERS} and R = {_BUFFERS}.",
    )
    center = average.center(state, theta, buffers)
    forms = [tuple(part.shape) for part in center]
    require(
        forms == [(_MODES, _PARAMETERS), (_MODES, _BUFFERS)],
        f"center has shapes {forms}; expected [K, P] and [K, R].",
    )
    for name, part in (*found._asdict().items(), ("center", center[0])):
        require(part.dtype == theta.dtype, f"{name} has dtype {part.dtype}, not {theta.dtype}.")
        require(bool(part.isfinite().all()), f"{name} holds nan or infinity.")
    require_equal(
        snapshot(state, {"theta": theta, "buffers": buffers}),
        copies,
        "predictors or center wrote to an argument",
    )


def check_modes_are_separate(average: Average) -> None:
    """Checks that a mode's state depends on this mode only."""
    trained = torch.ones(_MODES, dtype=torch.bool)
    states = []
    for factor in (1.0, 3.0):
        other = torch.ones(_MODES, 1, dtype=torch.float64)
        other[1:] = factor
        state = average.init(*(part * other for part in _models(0)))
        for round in range(_ROUNDS):
            theta, buffers = (part * other for part in _models(round))
            state = average.update(state, theta, buffers, trained, round, _LR)
        states.append({name: value[:1] for name, value in state.items()})
    require_equal(states[1], states[0], "The state of a mode depends on other modes")


def check_idle_modes(average: Average) -> None:
    """Checks that a mode without clients keeps its predictors, after those that were pending."""
    theta, buffers = _models(0)
    state = average.init(theta, buffers)
    trained = torch.tensor([True, False, True])
    for round in range(_ROUNDS):
        changed, statistics = _models(round)
        theta = torch.where(trained.unsqueeze(1), changed, theta)
        buffers = torch.where(trained.unsqueeze(1), statistics, buffers)
        state = average.update(state, theta, buffers, trained, round, _LR)
    center = average.center(state, theta, buffers)
    never = {"theta": center[0][1:2], "buffers": center[1][1:2]}
    current = {"theta": theta[1:2], "buffers": buffers[1:2]}
    require_equal(never, current, "A mode that was never trained is not its own average")
    # A model may be due at the end of a period in which the mode was idle, but once only.
    idle = torch.zeros(_MODES, dtype=torch.bool)
    seen = []
    for round in range(_ROUNDS, 60 * _ROUNDS):
        state = average.update(state, theta, buffers, idle, round, _LR)
        seen.append(state)
    require_equal(seen[-1], seen[len(seen) // 2], "A mode without clients changes its average")


def check_training(average: Average) -> None:
    """Checks in a federation that training is the same to the bit, and the checkpoint exact."""
    algorithm = FedAvg(lr=0.3, lr_decay=0.5, lr_decay_every=3)

    def make(rule: Average | str) -> Tree:
        made = small_federation(algorithm, "loop", 2, 2, average=rule)
        return train(made, _ROUNDS).tensors()

    with_average, plain = make(average), make("none")
    trained = {name: value for name, value in with_average.items() if name in plain}
    require_equal(trained, plain, "Training with the average")
    first, second = (small_federation(algorithm, "loop", 2, 2, average=average) for _ in range(2))
    train(first, _ROUNDS // 2)
    second.restore({n: t.clone() for n, t in first.tensors().items()}, first.round)
    train(second, _ROUNDS - _ROUNDS // 2)
    require_equal(second.tensors(), with_average, "A training that was resumed")


def _models(round: int) -> tuple[Tensor, Tensor]:
    """Parameters and running statistics after a round, [K, P] and [K, R]."""
    return numbers(_MODES, _PARAMETERS, word=round), numbers(_MODES, _BUFFERS, word=100 + round)
