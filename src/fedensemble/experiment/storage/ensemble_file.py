"""Reads and writes modes.safetensors: the tensors of the K modes and the facts about the model.

Other programs can read the file: each tensor has the name of its entry in the state_dict.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...checkpoint_file import read_checkpoint, write_checkpoint
from ...config.build import build_model
from ...config.packages import require_packages
from ...config.python_parts import python_parts, without_parts
from ...config.schema import Config, resolve
from ...data import FederatedData
from ...data.normalize import Standardise
from ...errors import InputError, StoreError
from ...federation.memory_limits import check_recipe
from ...federation.resolve import select_device
from ...federation.serialization import FILE as FEDERATION_FILE
from ...modeling.factory import ModelFactory
from ...modeling.functional_model import FunctionalModel
from ...predict import Ensemble
from ...text import as_path
from .ensemble_file_checks import (
    FROZEN,
    PREDICTOR_BUFFERS,
    PREDICTORS,
    check_facts,
    check_frozen,
    check_modes,
    with_current_names,
)
from .read_json import read_table
from .run_folder import RunFolder


def write_modes(path: Path, ensemble: Ensemble, facts: dict[str, Any]) -> None:
    """Writes each mode's tensors as "<mode>/<name in the nn.Module's state_dict>".

    Frozen parameters, which all modes have in common, are written once, as "frozen/<name>".

    If a mode predicts with the average of S models, "<mode>/predictors" holds their parameters,
    [S, P], and "<mode>/predictor_buffers" their running statistics, [S, R], if they differ. The
    calibration is in the metadata of this file, so that it can never be one of other modes.

    Args:
        path: of the file.
        ensemble: the modes.
        facts: more metadata; `read_ensemble` needs "model", its input shape and number of outputs.
            "categories" are those of columns that hold the number of a category, by column.
    """
    tensors: dict[str, Tensor] = {}
    samples = ensemble.predictors.shape[1]
    # An empty vector need not be written, and equal ones are those of the mode.
    own_buffers = ensemble.buffers.shape[1] > 0 and not torch.equal(
        ensemble.predictor_buffers, ensemble.buffers.unsqueeze(1)
    )
    tensors |= {f"{FROZEN}/{name}": value for name, value in ensemble.model.frozen.items()}
    for mode in range(len(ensemble)):
        named = ensemble.model.theta_layout.unflatten(ensemble.theta[mode])
        named |= ensemble.model.buffer_layout.unflatten(ensemble.buffers[mode])
        tensors |= {f"{mode}/{name}": tensor for name, tensor in named.items()}
        if samples > 1:
            tensors[f"{mode}/{PREDICTORS}"] = ensemble.predictors[mode]
        if samples > 1 and own_buffers:
            statistics = ensemble.predictor_buffers[mode].expand(samples, -1)
            tensors[f"{mode}/{PREDICTOR_BUFFERS}"] = statistics.contiguous()
    normalize = ensemble.standardise
    metadata = {
        **facts,
        "modes": len(ensemble),
        "tokens": ensemble.tokens,
        "standardise": (None if normalize is None else [list(normalize.mean), list(normalize.std)]),
        "class_names": ensemble.class_names,
        "feature_names": ensemble.feature_names,
        **({"dirichlet": True} if ensemble.dirichlet else {}),
    }
    if ensemble.calibration is not None:
        metadata["calibration"] = ensemble.calibration.to_record()
    write_checkpoint(path, tensors, metadata)


def category_facts(data: FederatedData) -> dict[str, Any]:
    """Returns the categories that columns of the data number, for the metadata of `write_modes`."""
    categories = data.info.get("categories")
    return {"categories": categories} if categories else {}


def read_categories(path: Path) -> dict[str, list[str]]:
    """Returns the categories of columns that hold their numbers, from a file of modes."""
    categories: dict[str, list[str]] = check_facts(path, read_checkpoint(path)[1])["categories"]
    return categories


def read_model_facts(path: Path) -> dict[str, Any]:
    """Returns shape of an input and number of outputs of the models in a file of modes."""
    model: dict[str, Any] = check_facts(path, read_checkpoint(path)[1])["model"]
    return model


def load_ensemble(
    folder: str | Path,
    device: str | torch.device = "cpu",
    model: ModelFactory | None = None,
) -> Ensemble:
    """Returns the ensemble of a finished run; inputs must be scaled as in training.

    Args:
        folder: of the run.
        device: that the ensemble predicts on.
        model: a callable that returns the nn.Module; None builds the model of the config.
    """
    store = RunFolder(as_path(folder))
    values = _read_settings(store)
    parts = python_parts(values)
    if model is None and "model" in parts:
        raise InputError(
            f"The model '{values['model']['name']}' of {store.path} was given in Python and is not "
            "a registered one. Predict in Python: fedensemble.load_ensemble(folder, model=...). "
            "For the command line, register it before training "
            "(docs/how-to-bring-your-own.md#predict-on-the-command-line)."
        )
    try:
        config = resolve(without_parts(values, *parts) if parts else values, str(store.config_file))
    except InputError:
        environment = store.path / "env.json"
        if environment.exists():  # without its package, a model is unknown
            packages = read_table(environment).get("packages", {})
            require_packages(packages, f"The run in {store.path}")
        raise
    summary = store.summary()  # raises if the run is not finished
    if "loss" in parts and summary.get("task") == "regression":
        training = config.training.model_copy(update={"loss": "mse"})
        config = config.model_copy(update={"training": training})
    # An edited config could change the predictions without any error.
    store.require_unchanged("config.toml")
    torch_device = select_device(device)
    try:
        return read_ensemble(store.modes_file, config, torch_device, model)
    except StoreError as error:
        raise store.unreadable_modes(error) from None


def _read_settings(store: RunFolder) -> dict[str, Any]:
    """Returns the settings of a run; names the way out for a federation of an earlier version."""
    if not store.config_file.exists() and (store.path / FEDERATION_FILE).exists():
        raise InputError(
            f"{store.path} holds a federation that an earlier version saved, which needs its data "
            "to predict: load it with fedensemble.Federation.load(folder, model=..., data=...), "
            "and save it again."
        )
    return store.read_config()


def read_ensemble(
    path: Path, config: Config, device: torch.device, model: ModelFactory | None = None
) -> Ensemble:
    """Reads an ensemble; raises StoreError if the file does not fit the config.

    Args:
        path: a file that `write_modes` wrote.
        config: that the modes were trained with.
        device: that the ensemble predicts on.
        model: a callable that returns the nn.Module; None builds the model of the config.
    """
    tensors, metadata = read_checkpoint(path)
    facts = check_facts(path, metadata)
    dtype = getattr(torch, config.engine.dtype)
    passed = model is not None
    name = "the model that was passed" if passed else f"model '{config.model['name']}'"
    model = build_model(config.model, facts["model"]) if model is None else model
    check_recipe(model, facts["modes"], device, dtype)
    # The model checks the type of targets; without data, a single dummy target stands for them.
    has_labels = config.training.loss != "mse"
    targets = torch.zeros(1, dtype=torch.int64 if has_labels else torch.float32)
    functional_model = FunctionalModel(model, config.training.loss, targets, device, dtype)
    try:
        frozen = check_frozen(path, tensors, functional_model, facts["modes"], name)
        tensors = with_current_names(tensors, functional_model, facts["modes"])
        modes = check_modes(path, tensors, functional_model, facts["modes"], name)
    except StoreError as error:
        if not passed:
            raise
        # The file is whole (its checksum is right): the argument is wrong, not the run.
        raise InputError(f"{error} Pass the model that the run was trained with.") from None
    functional_model.use_frozen(frozen)
    theta = torch.stack([functional_model.theta_layout.flatten(mode) for mode in modes]).to(device)
    buffers = torch.stack([functional_model.buffer_layout.flatten(mode) for mode in modes]).to(
        device, functional_model.dtype
    )
    mean_std = facts["standardise"]
    standardise = None if mean_std is None else Standardise(*map(tuple, mean_std))
    predictors, predictor_buffers = (
        torch.stack([tensors[f"{mode}/{name}"] for mode in range(facts["modes"])]).to(device)
        if f"0/{name}" in tensors
        else None
        for name in (PREDICTORS, PREDICTOR_BUFFERS)
    )
    return Ensemble(
        functional_model,
        theta,
        buffers,
        predictors=predictors,
        predictor_buffers=predictor_buffers,
        standardise=standardise,
        combine=config.ensemble.combine,
        input_shape=facts["model"]["shape"],
        seed=config.seed,
        tokens=facts["tokens"],
        class_names=facts["class_names"],
        feature_names=facts["feature_names"],
        dirichlet=facts["dirichlet"],
        calibration=facts["calibration"],
        dropout_samples=config.ensemble.dropout_samples or 0,
    )
