"""Turns the arguments of a federation, such as registered names, into objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..arguments import check_names
from ..core.aggregator import Aggregator, aggregators
from ..core.algorithm import Algorithm, algorithms
from ..core.attack import Attack, attacks
from ..core.average import Average, averages
from ..core.engine import ENGINE_ARGUMENTS, Engine, engines
from ..core.parameters.personal_parts import PersonalParts, WithPersonalParts, check_personal
from ..core.parameters.shared import Shared
from ..core.parameters.shared_checks import check_server_update, check_sharing
from ..core.participation import Participation, participations
from ..core.schedule import Schedule, check_number, schedules
from ..core.visits.batches import LastBatch, LocalWork
from ..data.federated import FederatedData
from ..errors import InputError, setting
from ..modeling.functional_model import FunctionalModel
from ..modeling.server_context import ServerContext
from .preflight import check_outputs as check_outputs  # noqa: PLC0414 (deploy imports it here)

# The name of a registered component, or a dict with its name and options, as in a config.
Spec = str | Mapping[str, Any]


def resolve_algorithm(algorithm: Spec | Algorithm) -> Algorithm:
    """The algorithm; a name gives its default options, a dict has its name and options."""
    resolved = algorithms.build(algorithm)
    if not isinstance(resolved, Algorithm):
        raise InputError(
            "algorithm must be an Algorithm or a registered name; "
            f"got {_describe_argument(algorithm)}."
        )
    return resolved


def resolve_schedule(
    schedule: str | Schedule,
    modes: int,
    strata: int | None,
    clients_per_round: int | None,
    population: int,
) -> Schedule:
    """The schedule; by default each client of a round has a stratum of its own."""
    if isinstance(schedule, Schedule):
        return schedule
    if not isinstance(schedule, str):
        raise InputError(
            f"schedule must be a Schedule or a registered name; got {_describe_argument(schedule)}."
        )
    for name, value in (
        ("modes", modes),
        ("strata", strata),
        ("clients_per_round", clients_per_round),
    ):
        if value is not None:
            check_number(schedule, name, value)
    per_round = population if clients_per_round is None else clients_per_round
    if strata is None:
        strata = 1 if modes == 1 else max(min(per_round, population), 1)
    return schedules[schedule](modes=modes, strata=strata, clients_per_round=per_round)


def resolve_participation(
    participation: Spec | Participation, algorithm: Algorithm | None = None
) -> Participation:
    """The participation model; a name gives its default options.

    Args:
        algorithm: its option `stragglers`, if it has one, is that of the participation.
    """
    resolved = participations.build(participation)
    if not isinstance(resolved, Participation):
        raise InputError(
            "participation must be one such as Devices(ask=130), or a registered name; "
            f"got {_describe_argument(participation)}."
        )
    stragglers = getattr(algorithm, "stragglers", 0)
    if not stragglers or resolved.stragglers == stragglers:
        return resolved
    if resolved.stragglers is not None:
        raise InputError(
            f"{setting('participation.stragglers')} is {resolved.stragglers}, and "
            f"{setting('algorithm.stragglers')} is {stragglers}: leave one of them out."
        )
    return replace(resolved, stragglers=stragglers)


def resolve_aggregator(aggregator: Spec | Aggregator) -> Aggregator:
    """The aggregator; a name gives its default options."""
    resolved = aggregators.build(aggregator)
    if not isinstance(resolved, Aggregator):
        raise InputError(
            "aggregator must be one such as Median(), or a registered name; "
            f"got {_describe_argument(aggregator)}."
        )
    return resolved


def resolve_attack(attack: Spec | Attack | None) -> Attack | None:
    """The simulated attack, or None; a name gives its default options."""
    resolved = attacks.build(attack)
    if resolved is not None and not isinstance(resolved, Attack):
        raise InputError(
            "attack must be one such as SignFlip(share=0.1), or a registered name; "
            f"got {_describe_argument(attack)}."
        )
    return resolved


def resolve_average(average: Spec | Average) -> Average:
    """The average; a name gives its default options."""
    resolved = averages.build(average)
    if not isinstance(resolved, Average):
        raise InputError(
            "average must be one such as EMA(decay=0.9), or a registered name; "
            f"got {_describe_argument(average)}."
        )
    return resolved


def _describe_argument(argument: object) -> str:
    """The type of a wrong argument; for a class, also how to write an instance of it."""
    if not isinstance(argument, type):
        return type(argument).__name__
    name = argument.__name__
    options = [f.name for f in fields(argument) if f.init] if is_dataclass(argument) else []
    return f"the class {name}; write {name}({f'{options[0]}=...' if options else ''})"


def select_device(device: str | torch.device) -> torch.device:
    """The device; "auto" is CUDA if it is available, else the CPU."""
    if not isinstance(device, (str, torch.device)):
        raise InputError(f"device is 'cpu', 'cuda', 'cuda:0', ... or 'auto'; got {device!r}.")
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise InputError(
            f"device is 'cpu', 'cuda', 'cuda:0', ... or 'auto'; got '{device}'."
        ) from None
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise InputError(
            f"device '{device}' was asked for, but torch finds no CUDA device here; "
            "use 'cpu' or 'auto'."
        )
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        available = ", ".join(f"cuda:{index}" for index in range(torch.cuda.device_count()))
        raise InputError(f"device '{device}' was asked for, but here there is only {available}.")
    if resolved.type not in ("cpu", "cuda"):
        try:
            torch.ones(1).to(resolved).item()
        except Exception as error:  # each device type raises an error of its own
            raise InputError(
                f"device '{device}' was asked for, but torch cannot compute on one here; "
                "use 'cpu' or 'auto'."
            ) from error
    return resolved


def resolve_work(
    model: FunctionalModel,
    epochs: int,
    steps: int | None,
    batch_size: int,
    last_batch: LastBatch | None,
) -> LocalWork:
    """The local work of a client; `last_batch=None` is "wrap" with BatchNorm, else "keep"."""
    if last_batch is not None and not isinstance(last_batch, str):
        raise InputError(f"last_batch is 'keep', 'wrap' or 'drop'; got {last_batch!r}.")
    rule: LastBatch = last_batch or ("wrap" if model.has_batch_statistics else "keep")
    if rule == "keep" and model.has_batch_statistics:
        raise InputError(
            "last_batch='keep' pads a smaller batch, and padding must not enter BatchNorm's "
            "statistics; use 'wrap' or 'drop', or GroupNorm in the model."
        )
    return LocalWork(epochs, steps, batch_size, rule)


def resolve_server_context(
    model: FunctionalModel, data: FederatedData, schedule: Schedule
) -> ServerContext:
    """What the algorithm's server may use: the model, the server's inputs and clients per mode."""

    def normalized(x: Tensor) -> Tensor:
        return data.inputs(x.to(model.device), model.dtype)

    server_inputs = None if data.x_server is None else normalized(data.x_server)
    examples = normalized(data.x[:8].clone())
    total = int(data.size.sum())
    return ServerContext(model, examples, server_inputs, schedule.clients_per_mode, total)


def resolve_shared(
    patterns: tuple[str, ...],
    model: FunctionalModel,
    algorithm: Algorithm,
    schedule: Schedule,
    theta: Tensor,
) -> Shared | None:
    """The shared parameters; None if there are none, or only one mode, which shares with nobody.

    Args:
        theta: parameters of one model, [P]; only their number and dtype matter.
    """
    if not patterns:
        return None
    shared = Shared.of(patterns, model.theta_layout, model.buffer_layout, frozen=model.frozen)
    if schedule.modes == 1:
        return None
    check_sharing(algorithm, schedule, theta)
    check_server_update(algorithm, theta)
    return shared.to(model.device)


def resolve_alternate(alternate: bool | None, personal: tuple[str, ...]) -> bool:
    """Whether visits train the personal parameters first; raises if there are none."""
    if alternate is not None and not isinstance(alternate, bool):
        raise InputError(f"{setting('ensemble.alternate')} is true or false; got {alternate!r}.")
    if alternate and not personal:
        raise InputError(
            f"{setting('ensemble.alternate')} needs {setting('ensemble.personal')}, the parameters "
            "that are trained first, such as ['head.*']."
        )
    return bool(alternate)


def resolve_personal(
    patterns: tuple[str, ...],
    alternate: bool,
    shared: tuple[str, ...],
    model: FunctionalModel,
    algorithm: Algorithm,
    initial: tuple[Tensor, Tensor],
) -> Algorithm:
    """The algorithm for models with personal parts.

    Args:
        patterns: of the names of personal parameters.
        alternate: whether visits train them first.
        shared: patterns of shared parameters.
        initial: parameters [K, P] and running statistics [K, R] of new models.
    """
    if shared:
        raise InputError(
            f"{setting('ensemble.personal')} and {setting('ensemble.shared')} cannot be used "
            "together: leave one of them out."
        )
    check_personal(algorithm)
    first = (initial[0][0], initial[1][0])
    parts = PersonalParts.of(
        patterns, model.theta_layout, model.buffer_layout, first, alternate=alternate
    )
    return WithPersonalParts(algorithm, parts)


def resolve_engine_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """A copy of the engine's options, by name."""
    if options is not None and not (
        isinstance(options, Mapping) and all(isinstance(name, str) for name in options)
    ):
        raise InputError(
            "engine_options must be a dict of names and values, such as {'block': 8}; "
            f"got {options!r}."
        )
    return dict(options or {})


def resolve_engine(
    name: str,
    options: dict[str, Any],
    model: FunctionalModel,
    data: FederatedData,
    work: LocalWork,
    seed: int,
    schedule: Schedule | None = None,
) -> Engine:
    """A new engine of the registered name; raises if it does not take the options."""
    engine = engines[name]
    check_names(f"engine '{name}'", engine, options, given=ENGINE_ARGUMENTS)
    made = engines[name](model, data, work, seed, **options)  # type: ignore[call-arg]
    made.reports_visits = schedule is not None and schedule.needs_reports
    return made


def poison_labels(
    data: FederatedData, attack: Attack | None, malicious: Tensor | None
) -> FederatedData:
    """The data with the targets that malicious clients train on.

    Returns `data` itself if malicious clients train on their own targets.

    Args:
        malicious: True for malicious clients, bool [N].
    """
    if attack is None or malicious is None or attack.forges or not bool(malicious.any()):
        return data
    y = data.y.clone()
    for client in torch.nonzero(malicious).flatten().tolist():
        own = slice(int(data.start[client]), int(data.start[client] + data.size[client]))
        y[own] = attack.labels(y[own], data.classes)
    return replace(data, y=y)
