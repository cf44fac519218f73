"""The contract of an algorithm that lets modes interact, `Algorithm.couple`.

Such an algorithm does not keep modes separate in whole rounds. But everything before `couple` must:
the client's training and `server_update`. So these parts are checked in rounds without coupling,
and `couple` itself is checked to be a function of its arguments.
"""

from __future__ import annotations

from torch import Tensor

from ..core.algorithm import Algorithm
from ..core.round import finish_round
from ..core.types import RoundReport
from ..federation.federation import Federation
from ..flat_params import Tree
from .assertions import require, require_equal, snapshot
from .toy_problems import small_federation

_BUFFERS = "running statistics"


def uncoupled_round(federation: Federation) -> RoundReport:
    """The report of one more round of the federation, without the coupling of its modes."""
    request = federation.next_request()
    result = federation.engine.run_visits(*request)
    federation.state, report = finish_round(federation.state, request, result, federation.schedule)
    federation.engine.commit()
    return report


def check_coupling(algorithm: Algorithm, engine: str, modes: int, strata: int, rounds: int) -> None:
    """Checks that a round is the uncoupled round, then `couple`, and that this is a pure function.

    It must keep names, shapes and dtypes, write to no argument and return the same bits again.
    """
    federation = small_federation(algorithm, engine, modes, strata)
    name = type(algorithm).__name__
    for _ in range(rounds):
        request = federation.next_request()
        result = federation.engine.run_visits(*request)
        alone, _ = finish_round(federation.state, request, result, federation.schedule)
        cohort = result.cohort
        counts = {"count": cohort.count, "weight": cohort.weight, "share": cohort.share}
        inputs = (federation.state.modes, alone.modes, {_BUFFERS: alone.buffers}, counts)
        before = snapshot(*inputs)
        (first, buffers), (second, _) = (
            federation.algorithm.couple(alone.modes, alone.buffers, cohort) for _ in range(2)
        )
        require_equal(snapshot(*inputs), before, f"{name}.couple wrote into what it was given")
        forms, expected = _forms(first, buffers), _forms(alone.modes, alone.buffers)
        require(forms == expected, f"{name}.couple must keep the form {expected}; it gave {forms}.")
        require_equal(second, first, f"{name}.couple gave another result for the same arguments")
        federation.run_round(result)
        require_equal(
            {**federation.state.modes, _BUFFERS: federation.state.buffers},
            {**first, _BUFFERS: buffers},
            f"{name}, engine '{engine}': a round is not the round without coupling, then couple",
        )
        # The state before the round, which the caller may hold, is not written to either.
        require_equal(snapshot(*inputs), before, f"{name}: a round wrote into the state before it")


def _forms(modes: Tree, buffers: Tensor) -> dict[str, tuple[tuple[int, ...], str]]:
    tensors = {**modes, _BUFFERS: buffers}
    return {name: (tuple(value.shape), str(value.dtype)) for name, value in tensors.items()}
