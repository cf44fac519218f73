"""Settings of a saved federation, and checks of the tensors and settings that are read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..arguments import require_integer
from ..core.aggregator import Aggregator
from ..core.algorithm import Algorithm
from ..core.attack import Attack
from ..core.average import Average
from ..core.participation import Participation
from ..core.schedule import Schedule
from ..core.types import EnsembleState, Plan
from ..core.visits.batches import LocalWork
from ..data.federated import FederatedData
from ..errors import InputError, StoreError
from ..flat_params import Tree
from ..modeling.frozen import is_earlier, read_earlier, same_fingerprint
from ..modeling.functional_model import FunctionalModel
from .spec import from_spec, to_spec

FILE = "federation.safetensors"
FROZEN = "frozen/fingerprint"  # of the parameters that are not trained
NO_ATTACK = "none"  # not None, which marks a component that a file cannot hold
_BY_NAME = ("algorithm", "schedule", "participation", "aggregator", "attack", "average")
_SETTINGS = (
    *_BY_NAME,
    "epochs",
    "steps",
    "batch_size",
    "last_batch",
    "loss",
    "engine",
    "engine_options",
    "shared",
    "personal",
    "alternate",
    "combine",
    "dropout_samples",
    "device",
    "dtype",
    "seed",
)
# Files of earlier versions lack these settings.
_ADDED_LATER = {
    "participation",
    "aggregator",
    "attack",
    "average",
    "shared",
    "personal",
    "alternate",
    "dropout_samples",
}
_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_CHANGEABLE = (  # by load()
    *_BY_NAME,
    "loss",
    "engine",
    "engine_options",
    "device",
    "combine",
    "dropout_samples",
)


def settings_of(
    algorithm: Algorithm,
    schedule: Schedule,
    participation: Participation,
    aggregator: Aggregator,
    attack: Attack | None,
    average: Average,
    work: LocalWork,
    model: FunctionalModel,
    engine: tuple[str, dict[str, Any]],
    *,
    shared: tuple[str, ...],
    personal: tuple[str, ...],
    alternate: bool,
    combine: str | None,
    dropout_samples: int,
    seed: int,
) -> dict[str, Any]:
    """A federation's arguments for a file; None for components that are not registered.

    Args:
        engine: name and options of the engine.
    """
    return {
        "algorithm": to_spec(algorithm),
        "schedule": to_spec(schedule),
        "participation": to_spec(participation),
        "aggregator": to_spec(aggregator),
        "attack": NO_ATTACK if attack is None else to_spec(attack),
        "average": to_spec(average),
        "epochs": work.epochs,
        "steps": work.steps,
        "batch_size": work.batch_size,
        "last_batch": work.last_batch,
        "loss": model.user_loss if isinstance(model.user_loss, str) else None,
        "engine": engine[0],
        "engine_options": engine[1],
        "shared": list(shared),
        "personal": list(personal),
        "alternate": alternate,
        "combine": combine,
        "dropout_samples": dropout_samples,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "seed": seed,
    }


def check_changes(changes: Mapping[str, Any]) -> None:
    """Raises InputError if one of the arguments may not change when a federation is loaded."""
    fixed = sorted(set(changes) - set(_CHANGEABLE))
    if fixed:
        raise InputError(
            f"{', '.join(fixed)} cannot change when a federation is loaded; make a new one instead."
        )


def read_arguments(
    folder: Path,
    path: Path,
    facts: Mapping[str, Any],
    data: FederatedData,
    changes: Mapping[str, Any],
) -> dict[str, Any]:
    """The arguments of a saved federation, without model and data.

    Raises InputError if it was saved with other data.

    Args:
        folder: of the federation, for messages.
        path: of the file, for messages.
        facts: the metadata of the file.
        changes: arguments that replace those in the file.
    """
    settings = _read_settings(path, facts)
    clients, examples = facts.get("data_size", facts["data"])
    if [clients, examples] != data_size(data):
        raise InputError(
            f"The federation in {folder} has {clients} clients with {examples} "
            f"examples; these data have {len(data)} with {len(data.x)}."
        )
    # Files of earlier versions lack these settings, which then had only one value.
    settings.setdefault("participation", {"name": "everybody"})
    settings.setdefault("aggregator", {"name": "mean"})
    settings.setdefault("attack", NO_ATTACK)
    settings.setdefault("shared", [])
    settings.setdefault("personal", [])
    settings.setdefault("alternate", False)
    settings.setdefault("average", {"name": "none"})
    settings.setdefault("dropout_samples", 0)
    for name in (*_BY_NAME, "loss"):
        if settings[name] is None and name not in changes:
            raise InputError(
                f"The {name} saved in {folder} is not a registered one: pass {name}=... to load()."
            )
    settings["dtype"] = _DTYPES[settings["dtype"]]
    for name in _BY_NAME:
        if name not in changes:
            spec = settings[name]
            settings[name] = None if spec == NO_ATTACK else _build_from_spec(path, name, spec)
    return {**settings, **changes}


def data_size(data: FederatedData) -> list[int]:
    """The numbers of clients and examples, a cheap way to notice that the data has changed."""
    return [len(data), len(data.x)]


def _read_settings(path: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in a file's metadata; raises StoreError if `save` could not have written it."""
    settings, round = facts.get("settings"), facts.get("round")
    # Files of earlier versions have the size as "data", where now the fingerprint of the data is.
    size = facts.get("data_size", facts.get("data"))
    if (
        not isinstance(settings, dict)
        or not isinstance(size, list)
        or len(size) != 2
        or type(round) is not int
    ):
        raise StoreError(
            f"{path} is damaged or no saved federation: its metadata has other entries."
        )
    unknown = sorted(set(settings) - set(_SETTINGS))
    missing = sorted(set(_SETTINGS) - _ADDED_LATER - set(settings))
    if unknown or missing:
        problem = f"unknown settings {unknown}" if unknown else f"no settings {missing}"
        raise StoreError(f"{path} is damaged, or of another version: it has {problem}.")
    if settings["dtype"] not in _DTYPES or not isinstance(settings["engine_options"] or {}, dict):
        raise StoreError(f"{path} is damaged: its dtype or its engine's options cannot be read.")
    return dict(settings)


def _build_from_spec(path: Path, name: str, spec: Any) -> Any:
    """A registered component from its specification; raises StoreError if its fields differ."""
    try:
        return from_spec(spec)
    except InputError:
        raise
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise StoreError(
            f"{path} is damaged, or of another version: its {name} cannot be made: {error}."
        ) from None


def read_state(
    tensors: Mapping[str, Tensor],
    round: int,
    fresh: EnsembleState,
    algorithm: Algorithm,
    schedule: Schedule,
    clients: int,
) -> tuple[EnsembleState, Tree, Tree]:
    """The checked state and client state in a checkpoint, and the engine's numerical choices.

    Args:
        tensors: as `Federation.checkpoint_tensors` returned them.
        round: number of completed rounds at that time.
        fresh: a state of the federation that is restored.
        clients: number of clients, N.
    """
    require_integer("restore()", "round", round)
    if "buffers" not in tensors:
        raise StoreError("The checkpoint does not fit: it has no entry 'buffers'.")
    stored, memory = EnsembleState.of(tensors, round, fresh.buffers.device)
    algorithm.check_state(stored.modes)
    # Server state that an earlier version of the algorithm did not have starts at zero.
    missing = {
        name: torch.zeros_like(t) for name, t in fresh.modes.items() if name not in stored.modes
    }
    stored = replace(stored, modes={**stored.modes, **missing})
    observes = type(schedule).observe is not Schedule.observe
    numerics = {
        name.removeprefix("engine/"): value
        for name, value in tensors.items()
        if name.startswith("engine/")
    }
    state = check_state(fresh, stored, observes=observes)
    theta = state.modes["theta"]
    if algorithm.joint:  # the modes of joint visits are one wide mode
        theta = theta.reshape(1, -1)
    return state, check_client_state(memory, algorithm, theta, clients), numerics


def with_frozen(tensors: Tree, model: FunctionalModel) -> Tree:
    """The tensors of a checkpoint with the fingerprint of the model's frozen parameters."""
    return {**tensors, FROZEN: model.frozen_fingerprint} if model.frozen else tensors


def check_frozen(tensors: Mapping[str, Tensor], model: FunctionalModel) -> Mapping[str, Tensor]:
    """The tensors of a checkpoint; raises StoreError if it has other frozen parameters.

    In files of earlier versions these parameters were buffers; they are left out.
    """
    if is_earlier(tensors, model):
        return read_earlier(tensors, model)
    stored = tensors.get(FROZEN)
    if stored is not None and not same_fingerprint(stored.cpu(), model.frozen_fingerprint):
        raise StoreError(
            "The checkpoint does not fit: it was written with other frozen parameters "
            "(requires_grad=False) than model() has now. Build the model with the weights that "
            "the training started with."
        )
    return tensors


def check_state(fresh: EnsembleState, stored: EnsembleState, observes: bool) -> EnsembleState:
    """The stored state; raises StoreError unless its tensors match those of the fresh state.

    A file of an older version may lack entries of the schedule's or the participation's state that
    were added since. They start with their initial values.

    Args:
        observes: whether the schedule's state depends on losses. If it does not, its tensors must
            have the sizes and the range of fresh ones: an index far outside the strata would make
            the schedule allocate huge tables.
    """
    _check_tensors("modes", fresh.modes, stored.modes)
    _check_tensors("statistics", {"buffers": fresh.buffers}, {"buffers": stored.buffers})
    _check_average(fresh.average, stored.average)
    schedule = _check_plugin_state("schedule", fresh.schedule, stored.schedule)
    if not observes:
        _check_schedule_tables(fresh.schedule, schedule)
    participation = _check_plugin_state("participation", fresh.participation, stored.participation)
    return replace(stored, schedule=schedule, participation=participation)


def replace_average(tensors: Tree, fresh: Tree) -> Tree:
    """The tensors of a checkpoint with the initial state of another average.

    An average with the same state, such as one with another decay, continues with it.
    """
    stored = {
        name.removeprefix("average/"): (value.shape, value.dtype)
        for name, value in tensors.items()
        if name.startswith("average/")
    }
    if stored == {name: (value.shape, value.dtype) for name, value in fresh.items()}:
        return tensors
    kept = {name: value for name, value in tensors.items() if not name.startswith("average/")}
    return {**kept, **{f"average/{name}": value for name, value in fresh.items()}}


def _check_average(fresh: Tree, stored: Tree) -> None:
    """Raises unless the stored state is that of this federation's average."""
    if set(fresh) != set(stored):
        raise StoreError(
            "The checkpoint does not fit: it was written with another average, with the state "
            f"{sorted(stored) or 'none'}; the state of this one is {sorted(fresh) or 'none'}. Use "
            "the average that it was written with; Federation.load(..., average=...) "
            "replaces it by a new one."
        )
    _check_tensors("averages", fresh, stored)


def check_client_state(memory: Tree, algorithm: Algorithm, theta: Tensor, clients: int) -> Tree:
    """The stored client state; raises StoreError unless it has one valid row per (client, mode).

    Args:
        theta: parameters of the modes, [K, P].
    """
    if "visits" not in memory:
        return memory
    visits = memory["visits"]
    if visits.dtype != torch.int64 or visits.dim() != 2 or visits.shape[1] != 2:
        raise StoreError(
            "The checkpoint does not fit: its list of visits is not one of clients and modes."
        )
    ends = torch.tensor([clients, len(theta)], device=visits.device)
    if bool(((visits < 0) | (visits >= ends)).any()) or len(torch.unique(visits, dim=0)) != len(
        visits
    ):
        raise StoreError(
            f"The checkpoint does not fit: it has visits beyond {clients} clients and "
            f"{len(theta)} modes."
        )
    fresh = {f"row.{n}": v for n, v in algorithm.init_client_state(theta[:1]).items()}
    rows = {name: value for name, value in memory.items() if name != "visits"}
    # Entries that a newer version added start as for a client that has never trained the mode.
    missing = set(fresh) - set(rows)
    if missing and len(visits):
        new = algorithm.init_client_state(theta[visits[:, 1].to(theta.device)])
        rows |= {name: new[name.removeprefix("row.")].to(visits.device) for name in missing}
    _check_tensors("client states", {n: v.expand(len(visits), -1) for n, v in fresh.items()}, rows)
    return {"visits": visits, **rows}


def check_plan(plan: Plan, clients: int, modes: int) -> None:
    """Raises StoreError if a plan made from a stored state has unknown clients or modes."""
    for what, index, end in (("clients", plan.client, clients), ("modes", plan.mode, modes)):
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < end:
            raise StoreError(
                f"The checkpoint does not fit: its schedule asks for {what} beyond the {end} "
                "there are."
            )


def _check_schedule_tables(fresh: Tree, stored: Tree) -> None:
    """Raises unless stored tables have the shapes of fresh ones, and integers in their range."""
    for name, expected in fresh.items():
        tensor = stored[name]
        is_table = expected.dim() > 0 and expected.numel() > 0 and not expected.is_floating_point()
        outside = (
            is_table
            and tensor.numel() > 0
            and (
                int(tensor.min()) < min(0, int(expected.min()))
                or int(tensor.max()) > int(expected.max())
            )
        )
        if tensor.shape != expected.shape or outside:
            raise StoreError(
                f"The checkpoint does not fit: '{name}' of its schedule has shape "
                f"{tuple(tensor.shape)} or values that this federation's, of shape "
                f"{tuple(expected.shape)}, cannot have."
            )


def _check_plugin_state(what: str, fresh: Tree, stored: Tree) -> Tree:
    """The stored state of a plug-in; raises unless dtypes and numbers of dimensions match.

    Sizes may differ: a schedule may record losses, and a trace of devices may have changed.
    """
    for name, tensor in stored.items():
        expected = fresh.get(name, tensor)
        if (tensor.dtype, tensor.dim()) != (expected.dtype, expected.dim()):
            raise StoreError(
                f"The checkpoint does not fit: '{name}' of its {what} is "
                f"{_dtype_name(tensor.dtype)} with {tensor.dim()} dimensions, and "
                f"{_dtype_name(expected.dtype)} with {expected.dim()} is expected."
            )
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise StoreError(f"The checkpoint cannot be used: '{name}' of its {what} holds nan.")
    return {**fresh, **stored}


def _check_tensors(what: str, expected: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> None:
    """Raises unless stored tensors have the expected names, shapes and dtypes, and are finite."""
    expected_forms, stored_forms = (
        {name: (tuple(t.shape), _dtype_name(t.dtype)) for name, t in tree.items()}
        for tree in (expected, stored)
    )
    if expected_forms != stored_forms:
        raise StoreError(
            f"The checkpoint does not fit: this federation has {what} {expected_forms}, "
            f"the file {stored_forms}."
        )
    for name, tensor in stored.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise StoreError(
                f"The checkpoint cannot be used: '{name}' of its {what} holds nan or infinity."
            )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
