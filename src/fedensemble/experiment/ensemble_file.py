"""The K trained modes as a file that other programs can read: named tensors, and what it takes to
rebuild the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import read_checkpoint, write_checkpoint
from ..config.build import build_model
from ..config.schema import Config, resolve
from ..data.normalize import Standardise
from ..errors import StoreError
from ..federation.memory_limits import check_recipe
from ..federation.resolve import find_device
from ..modeling.functional_model import FunctionalModel
from ..predict import Ensemble
from ..text import as_path
from .ensemble_file_checks import PREDICTORS, check_facts, check_modes
from .run_folder import RunFolder


def write_modes(path: Path, ensemble: Ensemble, facts: dict[str, Any]) -> None:
    """Writes each mode's tensors as "<mode>/<name in the nn.Module's state_dict>".

    Where a mode's prediction is an average over S models, their weights are rows of
    "<mode>/predictors", [S, P].
    """
    tensors: dict[str, Tensor] = {}
    for mode in range(len(ensemble)):
        named = ensemble.learner.theta_layout.unflatten(ensemble.theta[mode])
        named |= ensemble.learner.buffer_layout.unflatten(ensemble.buffers[mode])
        tensors |= {f"{mode}/{name}": tensor for name, tensor in named.items()}
        if ensemble.predictors.shape[1] > 1:
            tensors[f"{mode}/{PREDICTORS}"] = ensemble.predictors[mode]
    rule = ensemble.standardise
    held: dict[str, Any] = {"modes": len(ensemble), "tokens": ensemble.tokens}
    held["standardise"] = None if rule is None else [list(rule.mean), list(rule.std)]
    write_checkpoint(path, tensors, {**facts, **held})


def load_ensemble(folder: str | Path, device: str | torch.device = "cpu") -> Ensemble:
    """The ensemble of a finished run's folder, ready for inputs as they were given in training."""
    store = RunFolder(as_path(folder))
    config = resolve(store.read_config(), str(store.config_file))
    store.summary()  # says so if the run is not finished
    # other settings could give other predictions without a word
    store.refuse_changes("config.toml")
    place = find_device(device)
    try:
        return read_ensemble(store.modes_file, config, place)
    except StoreError as error:
        raise store.modes_lost(error) from None


def read_ensemble(path: Path, config: Config, device: torch.device) -> Ensemble:
    """The ensemble of a file of modes and the config they were trained with; raises StoreError if
    they do not fit.
    """
    tensors, facts = read_checkpoint(path)
    held = check_facts(path, facts)
    dtype = getattr(torch, config.engine.dtype)
    model = build_model(config.model, held["model"])
    check_recipe(model, held["modes"], device, dtype)
    classes = config.training.loss == "cross_entropy"
    targets = torch.zeros(1, dtype=torch.int64 if classes else torch.float32)
    learner = FunctionalModel(model, config.training.loss, targets, device, dtype)
    rows = check_modes(path, tensors, learner, held["modes"], str(config.model["name"]))
    theta = torch.stack([learner.theta_layout.flatten(row) for row in rows]).to(device)
    buffers = torch.stack([learner.buffer_layout.flatten(row) for row in rows]).to(
        device, learner.dtype
    )
    rule = held["standardise"]
    standardise = None if rule is None else Standardise(tuple(rule[0]), tuple(rule[1]))
    names = [f"{mode}/{PREDICTORS}" for mode in range(held["modes"])]
    predictors = (
        torch.stack([tensors[name] for name in names]).to(device) if names[0] in tensors else None
    )
    return Ensemble(
        learner,
        theta,
        buffers,
        predictors=predictors,
        standardise=standardise,
        combine=config.ensemble.combine,
        input_shape=held["model"]["shape"],
        seed=config.seed,
        tokens=held["tokens"],
    )
