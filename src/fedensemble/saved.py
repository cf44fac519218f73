"""What a file keeps of a federation beside its tensors, and what of it may change when it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .checkpoint import read_checkpoint
from .core.aggregator import Aggregator
from .core.algorithm import Algorithm
from .core.attack import Attack
from .core.batches import LocalWork
from .core.learner import Learner
from .core.participation import Participation
from .core.schedule import Schedule
from .core.types import EnsembleState
from .data.federated import FederatedData
from .errors import InputError, StoreError
from .parts import describe, revive
from .vectors import Tree

FILE = "federation.safetensors"
NO_ATTACK = "none"  # not None, which stands for a part that a file cannot hold
_BY_NAME = ("algorithm", "schedule", "participation", "aggregator", "attack")
_CHANGEABLE = (*_BY_NAME, "loss", "engine", "engine_options", "device", "combine")  # by load()


def settings_of(
    algorithm: Algorithm,
    schedule: Schedule,
    participation: Participation,
    aggregator: Aggregator,
    attack: Attack | None,
    work: LocalWork,
    learner: Learner,
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


def read(folder: str | Path, data: FederatedData, changes: Mapping[str, Any]) -> tuple[dict[str, Any], Tree, int]:
    """Arguments with these changes, tensors and rounds of the file in a folder; raises if it was for other data."""
    tensors, facts = read_checkpoint(Path(folder) / FILE)
    settings = dict(facts["settings"])
    fixed = sorted(set(changes) - set(_CHANGEABLE))
    if fixed:
        raise InputError(f"{', '.join(fixed)} cannot change when a federation is loaded; make a new one instead.")
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
            raise InputError(f"The {name} saved in {folder} is not a registered one: pass {name}=... to load().")
    settings["dtype"] = getattr(torch, settings["dtype"])
    for name in _BY_NAME:
        if name not in changes:
            settings[name] = None if settings[name] == NO_ATTACK else revive(settings[name])
    return {**settings, **changes}, tensors, facts["round"]


def size_of(data: FederatedData) -> list[int]:
    """Clients and examples: enough to notice other data without reading all of them."""
    return [len(data), len(data.x)]


def check_fit(state: EnsembleState, read: EnsembleState) -> None:
    """Raises unless the modes that were read have the form of those that are there."""
    expected, got = ({name: tuple(t.shape) for name, t in each.modes.items()} for each in (state, read))
    if expected != got:
        raise StoreError(f"The checkpoint does not fit: this federation has modes {expected}, the file {got}.")
