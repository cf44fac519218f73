"""The contract of an algorithm: its arithmetic, and its behavior when an engine trains it."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.algorithm import Algorithm
from ..core.engine import engines
from ..core.parameters.personal_parts import check_personal
from ..core.probe import probe
from ..core.round import Request, finish_round
from ..core.types import Plan, RoundReport
from ..engines.local.local_engine import LocalEngine
from ..errors import InputError
from ..federation.federation import Federation
from ..flat_params import Tree, select_rows
from .arithmetic import check_arithmetic
from .assertions import remembered, require, require_close, require_equal, snapshot
from .coupling import check_coupling, uncoupled_round
from .joint import check_joint_visits
from .reference import without_ensemble
from .toy_problems import small_federation, train

# More rounds than an age of four modes has, so that every mode is trained and the state of most
# clients is read again.
_ROUNDS = 5
# the contracts checked on each engine
_CONTRACTS = ("bytes", "agreement", "resume", "base method", "separation", "idle modes")
# the personal parameters of the small model: its last layer
_PERSONAL = ("2.*",)
_JOINT_CONTRACTS = ("agreement", "resume", "base method", "joint visits")
# What engines are compared with: state and client memory of runs of 'loop', by their settings.
_References = dict[tuple[Any, ...], tuple[Tree, Tree]]
# Pairs of modes and strata. With fewer strata than modes, some mode is idle in every round.
_ENSEMBLES = ((1, 1), (4, 2))


def check_algorithm(algorithm: Algorithm | type[Algorithm], engine: str | None = None) -> list[str]:
    """The names of the checks passed; raises AssertionError for a contract that is broken.

    Args:
        algorithm: an algorithm, or a class that needs no arguments.
        engine: a registered engine; None checks all engines that simulate on this machine.
    """
    method = algorithm() if isinstance(algorithm, type) else algorithm
    check_arithmetic(method)
    passed = ["arithmetic"]
    references: _References = {}
    for name in [engine] if engine is not None else simulation_engines():
        if method.couples:
            for modes, strata in _ENSEMBLES:
                check_coupling(method, name, modes, strata, _ROUNDS)
            passed.append(f"coupling, engine '{name}'")
        runs = {
            modes: train(small_federation(method, name, modes, strata), _ROUNDS)
            for modes, strata in _ENSEMBLES
        }
        for modes, strata in _ENSEMBLES:
            check_resume(method, name, runs[modes], strata)
            check_agreement(method, name, runs[modes], strata, references)
        check_base_method(method, name, runs[1])
        if method.joint:
            check_joint_visits(method, name, *_ENSEMBLES[-1])
            passed += [f"{what}, engine '{name}'" for what in _JOINT_CONTRACTS]
            continue
        check_bytes(method, name)
        check_separation(method, name, runs[_ENSEMBLES[-1][0]])
        check_idle(method, name)
        if can_train_personal_parts(method):
            check_personal_parts(method, name, references)
            passed.append(f"personal parts, engine '{name}'")
        passed += [f"{what}, engine '{name}'" for what in _CONTRACTS]
    return passed


def simulation_engines() -> list[str]:
    """Names of the registered engines that run on this machine alone."""
    return [name for name in engines if issubclass(engines[name], LocalEngine)]


def can_train_personal_parts(algorithm: Algorithm) -> bool:
    """Whether an algorithm can train models with personal parts."""
    try:
        check_personal(algorithm)
    except InputError:
        return False
    return True


def check_personal_parts(algorithm: Algorithm, engine: str, references: _References) -> None:
    """Checks runs with personal parts, trained together with the body and before it.

    The engine agrees with 'loop', a run can be resumed, a client's personal part changes only when
    the client trains the mode, and only the body travels.
    """
    modes, strata = _ENSEMBLES[-1]
    for alternate in (False, True):
        options = {"personal": _PERSONAL, "alternate": alternate}
        run = train(small_federation(algorithm, engine, modes, strata, **options), _ROUNDS)
        check_resume(algorithm, engine, run, strata, **options)
        check_agreement(algorithm, engine, run, strata, references, **options)
        what = f"{_name(algorithm)}, engine '{engine}', personal parts"
        before = remembered(run.engine)
        plan = run.next_request().plan
        train(run, 1)
        now = remembered(run.engine)
        visited = {
            f"client {client}, mode {mode}"
            for client, mode in zip(plan.client.tolist(), plan.mode.tolist(), strict=True)
        }
        others = {n: row for n, row in before.items() if n.partition(" of ")[2] not in visited}
        require_equal(
            {name: now[name] for name in others}, others, f"{what} of clients that did not train"
        )
        size = len(run.model.theta_layout.flatten(dict(run.model.build(0).named_parameters())))
        sent = probe(run.algorithm, run.state.modes["theta"][0]).sent["theta"]
        body = sent.shape[-1]
        require(body < size, f"{what}: {body} of {size} parameters travel")


def check_agreement(
    algorithm: Algorithm,
    engine: str,
    run: Federation,
    strata: int,
    references: _References,
    **options: Any,
) -> None:
    """Checks that the engine agrees with 'loop'. The runs of 'loop' are kept in `references`."""
    modes = run.schedule.modes
    key = (modes, strata, *sorted(options.items()))
    if engine == "loop":
        # Copies, because the caller trains the run on.
        references[key] = (_copy(run.state.modes), _copy(remembered(run.engine)))
        return
    if key not in references:
        other = train(small_federation(algorithm, "loop", modes, strata, **options), _ROUNDS)
        references[key] = (other.state.modes, remembered(other.engine))
    expected, memory = references[key]
    what = (
        f"{_name(algorithm)}, {modes} modes: engine '{engine}' disagrees with 'loop' after "
        f"{_ROUNDS} rounds"
    )
    require_close(run.state.modes, expected, what)
    require_close(remembered(run.engine), memory, f"{what} in client memory")


def check_resume(
    algorithm: Algorithm, engine: str, run: Federation, strata: int, **options: Any
) -> None:
    """Checks that a saved, loaded and continued run equals an uninterrupted one bit for bit.

    The two are trained separately, so this also checks that a seed determines every bit of a run.
    """
    modes = run.schedule.modes

    def start() -> Federation:
        return small_federation(algorithm, engine, modes, strata, **options)

    first = train(start(), _ROUNDS // 2)
    with tempfile.TemporaryDirectory() as folder:
        first.save(folder)
        second = Federation.load(
            Path(folder),
            model=first.model.factory,
            data=first.data,
            algorithm=algorithm,
            schedule=first.schedule,
        )
    what = f"{_name(algorithm)}, {modes} modes, engine '{engine}': a checkpoint round trip"
    require_equal(second.tensors(), first.tensors(), f"{what} lost something")
    train(second, _ROUNDS - _ROUNDS // 2)
    try:
        require_equal(
            second.tensors(),
            run.tensors(),
            f"{what} led to another result than an uninterrupted run",
        )
    except AssertionError:
        # Two uninterrupted runs tell whether the checkpoint is to blame, or the seed.
        require_equal(
            train(start(), _ROUNDS).tensors(),
            run.tensors(),
            f"{_name(algorithm)}, engine '{engine}': the same seed gave another run",
        )
        raise


def check_base_method(algorithm: Algorithm, engine: str, run: Federation) -> None:
    """Checks that an ensemble of one mode and one stratum is the base method itself."""
    expected, memory = without_ensemble(
        algorithm, small_federation(algorithm, engine, modes=1, strata=1), _ROUNDS
    )
    what = f"{_name(algorithm)}, engine '{engine}': one mode is not the method without ensemble"
    require_close(select_rows(run.state.modes, 0), expected, what)
    require_close(remembered(run.engine), memory, f"{what} in client memory")


def check_separation(algorithm: Algorithm, engine: str, run: Federation) -> None:
    """Checks that the start of a mode affects no other mode, its server state or client state.

    If the algorithm couples modes, this is checked in rounds without coupling.
    """
    modes, strata = _ENSEMBLES[-1]
    other = small_federation(algorithm, engine, modes, strata)
    # Change the start of the last mode, train again, and compare all the other modes.
    changed = modes - 1
    theta = other.state.modes["theta"].clone()
    theta[changed] = -theta[changed] + 0.1
    other.state = replace(other.state, modes=other.algorithm.init_mode(theta))
    if algorithm.couples:
        run = small_federation(algorithm, engine, modes, strata)
    for _ in range(_ROUNDS):
        _train_round(other)
        if algorithm.couples:
            _train_round(run)
    what = f"{_name(algorithm)}, engine '{engine}': mode {changed} leaks into other modes"
    require_equal(
        _without_mode(other.state.modes, changed), _without_mode(run.state.modes, changed), what
    )
    changed_run, original_run = (
        {n: t for n, t in remembered(f.engine).items() if not n.endswith(f"mode {changed}")}
        for f in (other, run)
    )
    require_equal(changed_run, original_run, f"{what}' client memory")


def check_idle(algorithm: Algorithm, engine: str) -> None:
    """Checks that a mode without visits does not change and that old states are not written to.

    If the algorithm couples modes, this is checked in rounds without coupling.
    """
    modes, strata = _ENSEMBLES[-1]
    federation = small_federation(algorithm, engine, modes, strata)
    for _ in range(_ROUNDS):
        old, before, stored = (
            federation.state,
            snapshot(federation.state.modes),
            remembered(federation.engine),
        )
        report = _train_round(federation)
        require_equal(
            snapshot(old.modes),
            before,
            f"{_name(algorithm)}: a round wrote into the state before it",
        )
        what = (
            f"{_name(algorithm)}, engine '{engine}', round {report.round}: a mode that no client "
            "trained changed"
        )
        now = remembered(federation.engine)
        for mode in set(range(modes)) - set(report.trained):
            require_equal(
                select_rows(federation.state.modes, mode),
                select_rows(old.modes, mode),
                f"{what} (mode {mode})",
            )
            idle = {name: row for name, row in stored.items() if name.endswith(f"mode {mode}")}
            require_equal(
                {name: now[name] for name in idle}, idle, f"{what} (client memory of mode {mode})"
            )


def check_bytes(algorithm: Algorithm, engine: str) -> None:
    """Checks that the bytes of a visit do not depend on the number of modes.

    Bytes may depend on the visit, on the state of the client and on how often it was absent. So all
    clients but one train mode 0, then all of them do, with one mode and with several. The shared
    random draw of mode 0 is the same in both cases.
    """
    costs: dict[int, list[list[list[int]]]] = {}
    for modes, strata in _ENSEMBLES:
        federation = small_federation(algorithm, engine, modes, strata)
        state, method = federation.state, federation.algorithm
        for count in (len(federation.data) - 1, len(federation.data)):
            plan = Plan(torch.arange(count), torch.zeros(count, dtype=torch.int64))
            request = Request(
                method, method.broadcast(state.modes), state.buffers, plan, state.round
            )
            returned = federation.engine.run_visits(*request)
            state, _ = finish_round(state, request, returned, federation.schedule)
            federation.engine.commit()
            costs.setdefault(modes, []).append(
                torch.stack([returned.bytes_up, returned.bytes_down], 1).tolist()
            )
    one, several = (costs[modes] for modes, _ in _ENSEMBLES)
    require(
        one == several,
        f"{_name(algorithm)}, engine '{engine}': bytes of visits (up, down) depend on the number "
        f"of modes: with one {one}, with several {several}.",
    )


def _train_round(federation: Federation) -> RoundReport:
    """One more round of the federation, without the coupling of modes."""
    if federation.algorithm.couples:
        return uncoupled_round(federation)
    return next(federation.rounds(1))


def _without_mode(tree: Tree, mode: int) -> Tree:
    def others(value: Tensor) -> Tensor:
        return torch.cat([value[:mode], value[mode + 1 :]])

    return {name: others(value) for name, value in tree.items()}


def _copy(tree: Tree) -> Tree:
    return {name: value.clone() for name, value in tree.items()}


def _name(algorithm: Algorithm) -> str:
    return type(algorithm).__name__
