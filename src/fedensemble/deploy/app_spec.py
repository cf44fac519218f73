"""What an app's folder says: the config, and the facts about the data that a simulation would take
from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
import torch

from ..checkpoint import write_bytes
from ..config.build import build_data, build_model, model_facts
from ..config.plugins import build_algorithm
from ..config.schema import Config, resolve
from ..config.toml import read_toml
from ..core.algorithm import Algorithm
from ..data.federated import FederatedData
from ..data.normalize import Standardise
from ..errors import InputError
from ..federation.resolve import find_device
from ..modeling.functional_model import FunctionalModel

CONFIG, FACTS = "config.toml", "facts.toml"


@dataclass(frozen=True)
class Description:
    """A config, and what server and clients must agree on beside it.

    Args:
        shape: of one input.
        outputs: of the model.
        standardise: what inputs go through, or None.
    """

    config: Config
    shape: tuple[int, ...]
    outputs: int
    standardise: Standardise | None

    @property
    def model(self) -> dict[str, Any]:
        """What a model must know of the data."""
        return {"shape": list(self.shape), "outputs": self.outputs}

    @property
    def algorithm(self) -> Algorithm:
        """The method."""
        return build_algorithm(self.config.algorithm)

    def learner(self, device: str) -> FunctionalModel:
        """The model's structure and the loss."""
        loss = self.config.training.loss
        targets = torch.zeros(1, dtype=torch.int64 if loss == "cross_entropy" else torch.float32)
        dtype = getattr(torch, self.config.engine.dtype)
        return FunctionalModel(
            build_model(self.config.model, self.model), loss, targets, find_device(device), dtype
        )

    def client_data(self, pair: Any) -> FederatedData:
        """A client's inputs and targets as data of one client; raises if they are not what the
        model was made for.
        """
        classes = self.outputs if self.config.training.loss == "cross_entropy" else None
        data = FederatedData.from_clients([pair], standardise=self.standardise, classes=classes)
        if tuple(data.x.shape[1:]) != self.shape:
            raise InputError(
                f"load() in data.py gave inputs of shape {tuple(data.x.shape[1:])}, but the model takes {self.shape}: "
                f"change load(), or shape in {FACTS}."
            )
        return data


def write_description(folder: Path, config: Config) -> Description:
    """Writes a config and the facts of its data into an app's folder."""
    data = build_data(config)
    facts: dict[str, Any] = model_facts(data, config.training.loss)
    if data.standardise is not None:
        facts["standardise"] = {
            "mean": list(data.standardise.mean),
            "std": list(data.standardise.std),
        }
    write_bytes(folder / CONFIG, config.toml().encode())
    write_bytes(folder / FACTS, tomli_w.dumps(facts).encode())
    return read_description(folder)


def refuse_attack(config: Config) -> None:
    """Raises where a config for real clients simulates malicious ones."""
    if config.attack is not None:
        raise InputError(
            f"[attack] '{config.attack['name']}' is for simulation only: take it out of the config."
        )


def read_description(folder: Path) -> Description:
    """The description in an app's folder."""
    config = resolve(read_toml(folder / CONFIG), str(folder / CONFIG))
    refuse_attack(config)
    facts = read_toml(folder / FACTS)
    rule = facts.get("standardise")
    try:
        return Description(
            config=config,
            shape=tuple(int(length) for length in facts["shape"]),
            outputs=int(facts["outputs"]),
            standardise=None
            if rule is None
            else Standardise(tuple(rule["mean"]), tuple(rule["std"])),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{folder / FACTS} needs shape (a list of lengths), outputs (a number) and, where inputs are standardised, "
            f"standardise.mean and standardise.std (lists of numbers): {error!r}."
        ) from None


def example_client(folder: Path, node: Mapping[str, Any]) -> tuple[Any, Any]:
    """Inputs and targets of client `partition-id` in the config's own data set, for trying an app
    out.
    """
    data, partition = build_data(read_description(folder).config), node.get("partition-id")
    if not isinstance(partition, int) or not 0 <= partition < len(data):
        raise InputError(
            f"The example data have clients 0 to {len(data) - 1}; got partition-id {partition}. Start the SuperNode "
            "with --node-config 'partition-id=0', or change load() in data.py."
        )
    return data.client(partition)
