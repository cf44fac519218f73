"""Specification of an app: its config, and the shapes that server and clients must agree on.

A simulation reads these shapes from the data. The server of a fleet has no data, so an app's folder
states them in facts.toml.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
import torch

from ..checkpoint_file import write_bytes
from ..config.build import build_data, build_model, model_facts
from ..config.plugins import build_algorithm
from ..config.schema import Config, resolve
from ..config.toml import read_toml
from ..core.algorithm import Algorithm
from ..data.federated import FederatedData
from ..data.label_names import check_class_names
from ..data.normalize import Standardise
from ..errors import InputError
from ..federation.resolve import select_device
from ..modeling.functional_model import FunctionalModel

CONFIG, FACTS = "config.toml", "facts.toml"


@dataclass(frozen=True)
class AppSpec:
    """Specification of an app.

    Args:
        config: the config to train.
        shape: shape of one input.
        outputs: number of outputs of the model.
        standardise: normalisation of the inputs, or None.
        class_names: name of each class, or None; sites may then give labels as these names.
    """

    config: Config
    shape: tuple[int, ...]
    outputs: int
    standardise: Standardise | None
    class_names: tuple[str, ...] | None = None

    @property
    def model(self) -> dict[str, Any]:
        """The facts about the data that a model needs."""
        return {"shape": list(self.shape), "outputs": self.outputs}

    @property
    def algorithm(self) -> Algorithm:
        """The federated algorithm."""
        return build_algorithm(self.config.algorithm)

    def build_model(self, device: str) -> FunctionalModel:
        """Returns the model as a function, with its loss."""
        loss = self.config.training.loss
        # A placeholder: the model only needs the dtype, to tell classification from regression.
        targets = torch.zeros(1, dtype=torch.float32 if loss == "mse" else torch.int64)
        dtype = getattr(torch, self.config.engine.dtype)
        return FunctionalModel(
            build_model(self.config.model, self.model), loss, targets, select_device(device), dtype
        )

    def build_client_data(self, pair: Any) -> FederatedData:
        """Returns inputs and targets as data of one client; raises InputError if shapes differ."""
        classes = {"cross_entropy": self.outputs, "bce": 2}.get(self.config.training.loss)
        data = FederatedData.from_clients(
            [pair],
            standardise=self.standardise,
            classes=classes,
            class_names=self.class_names,
        )
        if tuple(data.x.shape[1:]) != self.shape:
            raise InputError(
                f"load() in data.py returned inputs of shape {tuple(data.x.shape[1:])}, but the "
                f"model takes {self.shape}: change load(), or shape in {FACTS}."
            )
        return data


def write_app_spec(folder: Path, config: Config) -> AppSpec:
    """Writes a config and the facts about its data into an app's folder; returns them."""
    data = build_data(config)
    facts: dict[str, Any] = model_facts(data, config.training.loss)
    if data.standardise is not None:
        facts["standardise"] = {
            "mean": list(data.standardise.mean),
            "std": list(data.standardise.std),
        }
    if data.class_names is not None:
        facts["class_names"] = list(data.class_names)
    write_bytes(folder / CONFIG, config.toml().encode())
    write_bytes(folder / FACTS, tomli_w.dumps(facts).encode())
    return read_app_spec(folder)


def reject_attack(config: Config) -> None:
    """Raises InputError if a config has a table [attack], which is for simulation only."""
    if config.attack is not None:
        raise InputError(
            f"[attack] '{config.attack['name']}' is for simulation only: take it out of the config."
        )


def read_app_spec(folder: Path) -> AppSpec:
    """Returns the specification in an app's folder."""
    config = resolve(read_toml(folder / CONFIG), str(folder / CONFIG))
    reject_attack(config)
    facts = read_toml(folder / FACTS)
    standardise = facts.get("standardise")
    try:
        return AppSpec(
            config=config,
            shape=tuple(int(length) for length in facts["shape"]),
            outputs=int(facts["outputs"]),
            standardise=None
            if standardise is None
            else Standardise(tuple(standardise["mean"]), tuple(standardise["std"])),
            class_names=check_class_names(facts["class_names"]) if "class_names" in facts else None,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{folder / FACTS} needs shape (a list of integers), outputs (an integer) and, where "
            "inputs are standardised, standardise.mean and standardise.std (lists of numbers); "
            f"class_names is a list of different texts: {error!r}."
        ) from None


def example_client(folder: Path, node: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns inputs and targets of client `partition-id` in the config's dataset."""
    data, partition = build_data(read_app_spec(folder).config), node.get("partition-id")
    if not isinstance(partition, int) or not 0 <= partition < len(data):
        raise InputError(
            f"The example data have clients 0 to {len(data) - 1}; got partition-id {partition}. "
            "Start the SuperNode with --node-config 'partition-id=0', or change load() in data.py."
        )
    return data.client(partition)
