"""What a file keeps of a federation beside its tensors, and what of it may change when it is
loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import read_checkpoint
from ..core.aggregator import Aggregator
from ..core.algorithm import Algorithm
from ..core.attack import Attack
from ..core.batches import LocalWork
from ..core.participation import Participation
from ..core.schedule import Schedule
from ..core.types import EnsembleState, Plan
from ..data.federated import FederatedData
from ..errors import InputError, StoreError
from ..flat_params import Tree
from ..modeling.functional_model import FunctionalModel
from ..text import as_path
from .spec import describe, from_spec

FILE = "federation.safetensors"
NO_ATTACK = "none"  # not None, which stands for a part that a file cannot hold
_BY_NAME = ("algorithm", "schedule", "participation", "aggregator", "attack")
_SETTINGS = (
    *_BY_NAME,
    "epochs",
    "steps",
    "batch_size",
    "last_batch",
    "loss",
    "engine",
    "engine_options",
    "combine",
    "device",
    "dtype",
    "seed",
)
_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_CHANGEABLE = (*_BY_NAME, "loss", "engine", "engine_options", "device", "combine")  # by load()


def settings_of(
    algorithm: Algorithm,
    schedule: Schedule,
    participation: Participation,
    aggregator: Aggregator,
    attack: Attack | None,
    work: LocalWork,
    learner: FunctionalModel,
    engine: tuple[str, dict[str, Any]],
    *,
    combine: str | None,
    seed: int,
) -> dict[str, Any]:
    """A federation's arguments as a file can hold them; None for parts that are not registered.

    Args:
        engine: its name and options.
    """
    return {
        "algorithm": describe(algorithm),
        "schedule": describe(schedule),
        "participation": describe(participation),
        "aggregator": describe(aggregator),
        "attack": NO_ATTACK if attack is None else describe(attack),
        "epochs": work.epochs,
        "steps": work.steps,
        "batch_size": work.batch_size,
        "last_batch": work.last_batch,
        "loss": learner.loss_given if isinstance(learner.loss_given, str) else None,
        "engine": engine[0],
        "engine_options": engine[1],
        "combine": combine,
        "device": str(learner.device),
        "dtype": str(learner.dtype).removeprefix("torch."),
        "seed": seed,
    }


def read(
    folder: str | Path, data: FederatedData, changes: Mapping[str, Any]
) -> tuple[dict[str, Any], Tree, int]:
    """Arguments with these changes, tensors and rounds of the file in a folder; raises if it was
    for other data.
    """
    path = as_path(folder) / FILE
    tensors, facts = read_checkpoint(path)
    settings = _settings_in(path, facts)
    fixed = sorted(set(changes) - set(_CHANGEABLE))
    if fixed:
        raise InputError(
            f"{', '.join(fixed)} cannot change when a federation is loaded; make a new one instead."
        )
    if facts["data"] != size_of(data):
        raise InputError(
            f"The federation in {folder} has {facts['data'][0]} clients with {facts['data'][1]} examples; "
            f"these data have {len(data)} with {len(data.x)}."
        )
    # Files from before there was any other:
    settings.setdefault("participation", {"name": "everybody"})
    settings.setdefault("aggregator", {"name": "mean"})
    settings.setdefault("attack", NO_ATTACK)
    for name in (*_BY_NAME, "loss"):
        if settings[name] is None and name not in changes:
            raise InputError(
                f"The {name} saved in {folder} is not a registered one: pass {name}=... to load()."
            )
    settings["dtype"] = _DTYPES[settings["dtype"]]
    for name in _BY_NAME:
        if name not in changes:
            given = settings[name]
            settings[name] = None if given == NO_ATTACK else _revived(path, name, given)
    return {**settings, **changes}, tensors, facts["round"]


def size_of(data: FederatedData) -> list[int]:
    """Clients and examples: enough to notice other data without reading all of them."""
    return [len(data), len(data.x)]


def _settings_in(path: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in a file's description; raises StoreError unless the description is one that
    `save` writes.
    """
    settings, size, round = facts.get("settings"), facts.get("data"), facts.get("round")
    if (
        not isinstance(settings, dict)
        or not isinstance(size, list)
        or len(size) != 2
        or type(round) is not int
    ):
        raise StoreError(
            f"{path} is damaged or no saved federation: its description has other entries."
        )
    unknown = sorted(set(settings) - set(_SETTINGS))
    missing = sorted(set(_SETTINGS) - {"participation", "aggregator", "attack"} - set(settings))
    if unknown or missing:
        named = f"unknown settings {unknown}" if unknown else f"no settings {missing}"
        raise StoreError(f"{path} is damaged, or of another version: it has {named}.")
    if settings["dtype"] not in _DTYPES or not isinstance(settings["engine_options"] or {}, dict):
        raise StoreError(f"{path} is damaged: its dtype or its engine's options cannot be read.")
    return dict(settings)


def _revived(path: Path, name: str, description: Any) -> Any:
    """A registered part from its description; raises StoreError where it has other fields."""
    try:
        return from_spec(description)
    except InputError:
        raise
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise StoreError(
            f"{path} is damaged, or of another version: its {name} cannot be made: {error}."
        ) from None


def fitted(state: EnsembleState, read: EnsembleState, observes: bool) -> EnsembleState:
    """A state that was read; raises StoreError unless its tensors have the names, shapes and types
    of `state`'s.

    A file of an older version may lack entries of the schedule's or the participation's state,
    which were added since: they have the values they start with.

    Args:
        observes: whether the schedule's state depends on what it saw. One that does not keeps the
            sizes and the range of the fresh one: a stratum that is not there would ask for more
                memory than there is.
    """
    _compare("modes", state.modes, read.modes)
    _compare("statistics", {"buffers": state.buffers}, {"buffers": read.buffers})
    schedule = _with_kinds("schedule", state.schedule, read.schedule)
    if not observes:
        _check_strata(state.schedule, schedule)
    participation = _with_kinds("participation", state.participation, read.participation)
    return replace(read, schedule=schedule, participation=participation)


def fitted_memory(memory: Tree, algorithm: Algorithm, theta: Tensor, clients: int) -> Tree:
    """Client states that were read; raises StoreError unless they are rows that the method keeps
    for (client, mode)s.

    Args:
        theta: weights of the modes, [K, P].
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
            f"The checkpoint does not fit: it has visits beyond {clients} clients and {len(theta)} modes."
        )
    fresh = {f"row.{n}": v for n, v in algorithm.init_memory(theta[:1]).items()}
    rows = {name: value for name, value in memory.items() if name != "visits"}
    missing = set(fresh) - set(
        rows
    )  # kept since a newer version: it starts as for a client that never trained the mode
    if missing and len(visits):
        new = algorithm.init_memory(theta[visits[:, 1].to(theta.device)])
        rows |= {name: new[name.removeprefix("row.")].to(visits.device) for name in missing}
    _compare("client states", {n: v.expand(len(visits), -1) for n, v in fresh.items()}, rows)
    return {"visits": visits, **rows}


def check_plan(plan: Plan, clients: int, modes: int) -> None:
    """Raises StoreError if a plan made from a state that was read asks clients or modes that there
    are not.
    """
    for what, index, end in (("clients", plan.client, clients), ("modes", plan.mode, modes)):
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < end:
            raise StoreError(
                f"The checkpoint does not fit: its schedule asks for {what} beyond the {end} there are."
            )


def _check_strata(fresh: Tree, read: Tree) -> None:
    """Raises unless tables of a schedule have the sizes of fresh ones, and integers in the range of
    theirs.
    """
    for name, like in fresh.items():
        got = read[name]
        table = like.dim() > 0 and like.numel() > 0 and not like.is_floating_point()
        outside = (
            table
            and got.numel() > 0
            and (int(got.min()) < min(0, int(like.min())) or int(got.max()) > int(like.max()))
        )
        if got.shape != like.shape or outside:
            raise StoreError(
                f"The checkpoint does not fit: '{name}' of its schedule has shape {tuple(got.shape)} or values that "
                f"this federation's, of shape {tuple(like.shape)}, cannot have."
            )


def _with_kinds(what: str, fresh: Tree, read: Tree) -> Tree:
    """The state of a plug-in that was read; raises unless its tensors are of the types and
    dimensions of fresh ones.

    Sizes may differ: a schedule may note what it saw, and a trace of devices may have changed
    since.
    """
    for name, tensor in read.items():
        like = fresh.get(name, tensor)
        if (tensor.dtype, tensor.dim()) != (like.dtype, like.dim()):
            raise StoreError(
                f"The checkpoint does not fit: '{name}' of its {what} is {_name(tensor.dtype)} with {tensor.dim()} "
                f"dimensions, and {_name(like.dtype)} with {like.dim()} is expected."
            )
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise StoreError(f"The checkpoint cannot be used: '{name}' of its {what} holds nan.")
    return {**fresh, **read}


def _compare(what: str, expected: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> None:
    forms = [
        {name: (tuple(t.shape), _name(t.dtype)) for name, t in tree.items()}
        for tree in (expected, got)
    ]
    if forms[0] != forms[1]:
        raise StoreError(
            f"The checkpoint does not fit: this federation has {what} {forms[0]}, the file {forms[1]}."
        )
    for name, tensor in got.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise StoreError(
                f"The checkpoint cannot be used: '{name}' of its {what} holds nan or infinity."
            )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
