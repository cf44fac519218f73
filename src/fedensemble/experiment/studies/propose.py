"""Proposes the next trials of a search with Optuna, from the results of all trials before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...config.search_space import Range, Space
from ...errors import InputError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Settings = dict[str, str]  # by key, as they are typed

RANDOM = 10  # trials before the sampler learns from results
TRIES = 20  # per trial, to find one that is new


def propose(
    spaces: Sequence[Space],
    results: Sequence[tuple[Settings, float | None]],
    count: int,
    maximize: bool,
    seed: int,
) -> list[Settings]:
    """Returns the settings of up to `count` trials; fewer if the spaces have no others.

    The same arguments give the same trials. Optuna's tree-structured Parzen estimator proposes
    them. It takes trials that are still to be trained for bad ones, so that those of a batch
    differ.

    Args:
        spaces: of the settings.
        results: settings and objective of all trials before; None for one that has diverged.
        count: number of trials.
        maximize: whether higher values of the objective are better.
        seed: of the sampler.
    """
    optuna = _import_optuna()
    distributions = {space.key: _distribution(space) for space in spaces}
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=RANDOM, constant_liar=True)
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # a study is announced otherwise
    try:
        study = optuna.create_study(
            direction="maximize" if maximize else "minimize", sampler=sampler
        )
    finally:
        optuna.logging.set_verbosity(verbosity)
    for settings, value in results:
        # A pruned trial counts as worse than all finished ones, so that the sampler avoids the
        # values that diverge. It would ignore a failed one.
        state = optuna.trial.TrialState.PRUNED if value is None else None
        study.add_trial(
            optuna.trial.create_trial(
                params={space.key: _parameter(space, settings[space.key]) for space in spaces},
                distributions=distributions,
                value=value,
                state=state or optuna.trial.TrialState.COMPLETE,
            )
        )
    known = [settings for settings, _ in results]
    proposed: list[Settings] = []
    for _ in range(count * TRIES):
        asked = study.ask(distributions).params
        settings = {space.key: _typed(space, asked[space.key]) for space in spaces}
        if settings not in known + proposed:
            proposed.append(settings)
        if len(proposed) == count:
            break
    return proposed


def _distribution(space: Space) -> BaseDistribution:
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    if not isinstance(space, Range):
        return CategoricalDistribution(space.values)
    if space.integer:
        return IntDistribution(int(space.low), int(space.high), log=space.log)
    return FloatDistribution(space.low, space.high, log=space.log)


def _parameter(space: Space, text: str) -> Any:
    """Returns a setting as a parameter of Optuna."""
    if not isinstance(space, Range):
        return text
    return int(text) if space.integer else float(text)


def _typed(space: Space, parameter: Any) -> str:
    """Returns a parameter of Optuna as a setting."""
    return space.show(parameter) if isinstance(space, Range) else str(parameter)


def _import_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise InputError(
            "fedensemble tune needs the package optuna, which is not installed: "
            'pip install "fedensemble[tune]".'
        ) from None
    return optuna
