"""What fits together: parts by name or as they are, and a model that takes the data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..arguments import check_names
from ..core.aggregator import Aggregator, aggregators
from ..core.algorithm import Algorithm, algorithms
from ..core.attack import Attack, attacks
from ..core.batches import LastBatch, LocalWork
from ..core.engine import Engine, engines
from ..core.participation import Participation, participations
from ..core.schedule import Schedule, check_number, schedules
from ..data.federated import FederatedData
from ..data.label_checks import advise_labels, check_whole
from ..errors import InputError, first_line
from ..modeling.functional_model import FunctionalModel
from ..modeling.losses import check_loss
from ..modeling.model_checks import try_training
from ..modeling.server_context import ServerContext
from ..runtime.num_threads import num_threads
from ..runtime.oom import SMALLER_VISIT, lack, out_of_memory, raise_on_oom
from .token_ids import check_tokens


def check_data(data: FederatedData) -> None:
    """Raises unless these are clients' examples."""
    if not isinstance(data, FederatedData):
        raise InputError(
            f"data must be a FederatedData, as from_clients([...]) makes; got {type(data).__name__}."
        )


def check_seed(seed: int) -> None:
    """Raises unless keys can be made from it."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        raise InputError(f"seed must be a whole number of at most 63 bits; got {seed!r}.")


def resolve_algorithm(algorithm: str | Algorithm) -> Algorithm:
    """The method, by name with its defaults."""
    found = algorithms[algorithm]() if isinstance(algorithm, str) else algorithm
    if not isinstance(found, Algorithm):
        raise InputError(
            f"algorithm must be an Algorithm or a registered name; got {_kind(algorithm)}."
        )
    return found


def resolve_participation(participation: str | Participation) -> Participation:
    """The rule for who answers, by name with its defaults."""
    found = participations[participation]() if isinstance(participation, str) else participation
    if not isinstance(found, Participation):
        raise InputError(
            f"participation must be one such as Devices(ask=130), or a registered name; "
            f"got {_kind(participation)}."
        )
    return found


def find_aggregator(aggregator: str | Aggregator) -> Aggregator:
    """The rule by which uploads are combined, by name with its defaults."""
    found = aggregators[aggregator]() if isinstance(aggregator, str) else aggregator
    if not isinstance(found, Aggregator):
        raise InputError(
            f"aggregator must be one such as Median(), or a registered name; got {_kind(aggregator)}."
        )
    return found


def find_attack(attack: str | Attack | None) -> Attack | None:
    """The simulated attack, by name with its defaults; None for none."""
    found = attacks[attack]() if isinstance(attack, str) else attack
    if found is not None and not isinstance(found, Attack):
        raise InputError(
            f"attack must be one such as SignFlip(share=0.1), or a registered name; got {_kind(attack)}."
        )
    return found


def poison(data: FederatedData, attack: Attack | None, malicious: Tensor | None) -> FederatedData:
    """The data with the targets on which malicious clients train; the same data where they train on
    their own.

    Args:
        malicious: which clients are, bool [N].
    """
    if attack is None or malicious is None or attack.forges or not bool(malicious.any()):
        return data
    y = data.y.clone()
    for client in torch.nonzero(malicious).flatten().tolist():
        own = slice(int(data.start[client]), int(data.start[client] + data.size[client]))
        y[own] = attack.labels(y[own], data.classes)
    return replace(data, y=y)


def _kind(given: object) -> str:
    """What was got in place of a part; for a class, how to write one of it."""
    if not isinstance(given, type):
        return type(given).__name__
    options = [field.name for field in fields(given) if field.init] if is_dataclass(given) else []
    return f"the class {given.__name__}; write {given.__name__}({f'{options[0]}=...' if options else ''})"


def find_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """An engine's options by name."""
    if options is not None and not (
        isinstance(options, Mapping) and all(isinstance(name, str) for name in options)
    ):
        raise InputError(
            f"engine_options must be a dict of names and values, such as {{'block': 8}}; got {options!r}."
        )
    return dict(options or {})


def resolve_engine(
    name: str,
    options: dict[str, Any],
    learner: FunctionalModel,
    data: FederatedData,
    work: LocalWork,
    seed: int,
) -> Engine:
    """The engine of this name, with options that it takes."""
    engine = engines[name]
    check_names(f"engine '{name}'", engine, options, given=("learner", "data", "work", "seed"))
    return engines[name](learner, data, work, seed, **options)  # type: ignore[call-arg]


def find_device(device: str | torch.device) -> torch.device:
    """The device by name; "auto" is CUDA where there is any."""
    if not isinstance(device, (str, torch.device)):
        raise InputError(f"device is 'cpu', 'cuda', 'cuda:0', ... or 'auto'; got {device!r}.")
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise InputError(
            f"device is 'cpu', 'cuda', 'cuda:0', ... or 'auto'; got '{device}'."
        ) from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise InputError(
            f"device '{device}' was asked for, but torch finds no CUDA device here; use 'cpu' or 'auto'."
        )
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        have = ", ".join(f"cuda:{index}" for index in range(torch.cuda.device_count()))
        raise InputError(f"device '{device}' was asked for, but here there is only {have}.")
    if found.type not in ("cpu", "cuda"):
        try:
            torch.ones(1).to(found).item()
        except Exception as error:  # each kind of device has an error of its own
            raise InputError(
                f"device '{device}' was asked for, but torch cannot calculate on one here; use 'cpu' or 'auto'."
            ) from error
    return found


def resolve_work(
    learner: FunctionalModel,
    epochs: int,
    steps: int | None,
    batch_size: int,
    last_batch: LastBatch | None,
) -> LocalWork:
    """A client's work in a round, with the rule for the last batch that the model asks for."""
    if last_batch is not None and not isinstance(last_batch, str):
        raise InputError(f"last_batch is 'keep', 'wrap' or 'drop'; got {last_batch!r}.")
    rule: LastBatch = last_batch or ("wrap" if learner.has_batch_statistics else "keep")
    if rule == "keep" and learner.has_batch_statistics:
        raise InputError(
            "last_batch='keep' pads a smaller batch, and padding must not enter BatchNorm's statistics; "
            "use 'wrap' or 'drop', or GroupNorm in the model."
        )
    return LocalWork(epochs, steps, batch_size, rule)


def resolve_schedule(
    schedule: str | Schedule,
    modes: int,
    strata: int | None,
    clients_per_round: int | None,
    population: int,
) -> Schedule:
    """The schedule by name; without a number of strata, each of a round's clients has one of its
    own.
    """
    if isinstance(schedule, Schedule):
        return schedule
    if not isinstance(schedule, str):
        raise InputError(
            f"schedule must be a Schedule or a registered name; got {_kind(schedule)}."
        )
    for what, value in (
        ("modes", modes),
        ("strata", strata),
        ("clients_per_round", clients_per_round),
    ):
        if value is not None:
            check_number(schedule, what, value)
    per_round = population if clients_per_round is None else clients_per_round
    groups = (
        strata if strata is not None else (1 if modes == 1 else max(min(per_round, population), 1))
    )
    return schedules[schedule](modes=modes, strata=groups, clients_per_round=per_round)


@num_threads(1)
def check_outputs(learner: FunctionalModel, data: FederatedData) -> None:
    """Runs a few examples through the model, so that what does not fit is said before training."""
    model = learner.build(0).eval()
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError(
            "model() returned a scripted module (torch.jit), which cannot be run with weights from outside. Give the "
            "plain nn.Module; engine 'vector' makes it fast by itself."
        )
    check_tokens(model, data)
    model = model.to(learner.device)
    x, y = _few(learner, data, 8)
    try:
        with torch.no_grad():
            outputs = model(x)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise InputError(
            f"The model cannot take inputs of shape {tuple(x.shape)} {x.dtype}: {_reason(model, x, error)}"
        ) from None
    if not isinstance(outputs, Tensor):
        raise InputError(f"The model must return one tensor; got {type(outputs).__name__}.")
    if learner.task == "classification":
        if data.y.is_floating_point():
            what = advise_labels(data.y) or "For regression use loss='mse'."
            raise InputError(
                f"Loss 'cross_entropy' needs integer labels, and the targets are floats. {what}"
            )
        if outputs.shape[:-1] != y.shape and (advice := advise_labels(data.y)) is not None:
            raise InputError(
                f"Labels must be one whole number an example; got shape {tuple(data.y.shape)}. {advice}"
            )
        if outputs.shape[:-1] != y.shape:
            raise InputError(
                f"The model must return a number for every class, [B, ..., C], classes last; got shape "
                f"{tuple(outputs.shape)} for labels {tuple(y.shape)}."
            )
        if data.y_test is not None:
            check_whole(data.y_test, "Test labels")
        if outputs.shape[-1] < 2:
            raise InputError(
                "Classification needs two classes or more, and the model has one output for each example. Give labels "
                "of two classes; for regression use loss='mse'."
            )
        classes, highest = outputs.shape[-1], int(data.y.max())
        if highest >= classes:
            raise InputError(
                f"Labels go up to {highest}, but the model has {classes} outputs; it needs at least {highest + 1}."
            )
    try:
        learner.loss(outputs, y)
        check_loss(learner.loss_given, learner.loss, outputs, y)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, InputError) or out_of_memory(error):
            raise
        raise InputError(
            f"The loss cannot take outputs of shape {tuple(outputs.shape)} {outputs.dtype} and targets of shape "
            f"{tuple(y.shape)} {y.dtype}: {first_line(error)}"
        ) from error


def _reason(model: nn.Module, x: Tensor, error: Exception) -> str:
    """Why a model failed on inputs: memory or their type where that is it, otherwise what torch
    says.
    """
    if out_of_memory(error):
        return f"there is not enough memory{lack(error, x.device)}. Use a smaller model or a larger card or machine."
    embeds = any(isinstance(module, nn.Embedding) for module in model.modules())
    if embeds and x.is_floating_point():
        return "it embeds tokens, which are whole numbers. Give x as integers, or use a model for numbers."
    if not embeds and not x.is_floating_point():
        return "integers stay integers (tokens), and this model calculates with floats. Give x as floats, x.float()."
    return first_line(error)


def resolve_server_context(
    learner: FunctionalModel, data: FederatedData, schedule: Schedule
) -> ServerContext:
    """What a method's server may use: the model, the inputs the data hold for it, and what it must
    know of the plan.
    """

    def seen(x: Tensor) -> Tensor:
        return data.inputs(x.to(learner.device), learner.dtype)

    own = None if data.x_server is None else seen(data.x_server)
    return ServerContext(learner, seen(data.x[:8].clone()), own, schedule.clients_per_mode)


@num_threads(1)
def check_training(learner: FunctionalModel, data: FederatedData, batch_size: int) -> None:
    """Takes a step with two examples, so that what cannot be trained is said before; if it fails,
    with a batch.
    """
    for count in sorted({min(2, batch_size), batch_size}):
        x, y = _few(learner, data, count)
        try:
            with raise_on_oom(f"A step on {count} examples does", learner.device, SMALLER_VISIT):
                return try_training(learner, x, y)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            if isinstance(error, InputError) or out_of_memory(error):
                raise
            failed = error
    if learner.has_batch_statistics and isinstance(failed, ValueError):
        largest = int(data.size.max())
        advice = "Raise batch_size."
        if batch_size >= largest:
            most = f"{largest} example{'s' * (largest > 1)}"
            advice = (
                f"No client has more than {most}, so take GroupNorm, or clients with more examples."
            )
        raise InputError(
            f"BatchNorm cannot train on batches of {len(x)}: {first_line(failed)}. {advice}"
        ) from None
    raise InputError(
        f"The model cannot be trained on inputs of shape {tuple(x.shape)} {x.dtype}: {first_line(failed)}"
    ) from failed


def _few(learner: FunctionalModel, data: FederatedData, count: int) -> tuple[Tensor, Tensor]:
    """The first examples, in copies: a model may write into its inputs."""
    x, y = data.inputs(data.x[:count].clone(), learner.dtype), data.y[:count].clone()
    return x.to(learner.device), y.to(
        learner.device, learner.dtype if learner.task == "regression" else None
    )
