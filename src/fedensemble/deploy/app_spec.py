"""Specification of an app: its config, whose table `[data]` is a schema of the sites' data.

A simulation reads shapes and classes from the data. The server of a fleet has no data, so the
schema states them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
import torch
from torch import Tensor

from ..checkpoint_file import write_bytes
from ..config.build import build_data, build_model, data_table
from ..config.plugins import build_algorithm
from ..config.schema import Config, resolve
from ..config.toml import read_toml
from ..core.algorithm import Algorithm
from ..core.parameters.shared import check_patterns
from ..data.federated import FederatedData
from ..data.schema import Schema
from ..errors import InputError, setting
from ..federation.resolve import resolve_personal, select_device
from ..modeling.functional_model import FunctionalModel
from ..modeling.losses import count_outputs
from .requirements import check_requirements
from .site_files import read_examples

CONFIG, EXAMPLE = "config.toml", "example.toml"


@dataclass(frozen=True)
class AppSpec:
    """Specification of an app.

    Args:
        config: the config to train.
        schema: one example of the sites' data.
    """

    config: Config
    schema: Schema

    def __post_init__(self) -> None:
        loss = self.config.training.loss
        if loss != "mse" and self.schema.classes is None:
            raise InputError(
                f"Loss '{loss}' needs the number of classes: give data.classes or "
                'data.class_names, or for regression training.loss = "mse".'
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return self.schema.shape

    @property
    def classes(self) -> int | None:
        """Number of classes; None for regression."""
        return None if self.config.training.loss == "mse" else self.schema.classes

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Name of each class, or None."""
        return None if self.classes is None else self.schema.class_names

    @property
    def model(self) -> dict[str, Any]:
        """The facts about the data that a model needs."""
        outputs = self.schema.outputs
        if self.classes is not None:
            outputs = count_outputs(self.config.training.loss, self.classes)
        return {"shape": list(self.shape), "outputs": outputs}

    @property
    def algorithm(self) -> Algorithm:
        """The federated algorithm."""
        return build_algorithm(self.config.algorithm)

    def with_personal_parts(self, model: FunctionalModel, algorithm: Algorithm) -> Algorithm:
        """Returns the algorithm for personal parts, with equal initial ones on all machines."""
        table = self.config.ensemble
        name = setting("ensemble.personal")
        return resolve_personal(
            check_patterns(table.personal, name),
            bool(table.alternate),
            check_patterns(table.shared),
            model,
            algorithm,
            model.init_params(self.config.seed, 1),
        )

    def build_model(self, device: str) -> FunctionalModel:
        """Returns the model as a function, with its loss."""
        loss = self.config.training.loss
        # A placeholder: the model only needs the dtype, to tell classification from regression.
        targets = torch.zeros(1, dtype=torch.float32 if loss == "mse" else torch.int64)
        dtype = getattr(torch, self.config.engine.dtype)
        return FunctionalModel(
            build_model(self.config.model, self.model), loss, targets, select_device(device), dtype
        )

    def convert(self, pair: Any, where: str) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets as the schema describes them; raises if they are others."""
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise InputError(f"{where} must be a pair of inputs and targets; got {type(pair)}.")
        x = self.schema.convert_inputs(pair[0], where)
        return x, self.schema.convert_targets(pair[1], where)

    def build_client_data(self, pair: Any) -> FederatedData:
        """Returns inputs and targets as data of one client; raises InputError if shapes differ.

        With `data.calibration`, the client splits off the rows that a simulation splits off.
        """
        data = FederatedData.from_clients(
            [self.convert(pair, "The data of load() in data.py")],
            standardise=self.schema.standardise,
            classes=self.classes,
            class_names=self.class_names,
        )
        table = data_table(self.config)
        if table.get("calibration") is None:
            return data
        return data.with_calibration(table["calibration"], table["seed"])


def write_app_spec(folder: Path, config: Config) -> AppSpec:
    """Writes a config with a schema in place of its dataset into an app's folder; returns them.

    A config with `data.source = "schema"` needs no data. Another dataset is read once, for its
    schema, and stays in example.toml as data to try the app with.
    """
    if config.data["source"] != "schema":
        data = build_data(config)
        schema = Schema.from_data(data)
        values = config.values()
        example, values["data"] = values["data"], schema.to_options()
        kept = ["clients"]
        if example.get("calibration") is not None:
            kept += ["calibration", "seed"]
        values["data"] |= {key: example[key] for key in kept if example.get(key) is not None}
        if data.new_clients is not None:
            values["data"]["clients"] = len(data)
        # The rows of the example are whole, because each client of the fleet splits its own.
        example.pop("calibration", None)
        config = resolve(values)
        spec = AppSpec(config, schema)
        write_bytes(folder / EXAMPLE, tomli_w.dumps({"data": example}).encode())
    else:
        spec = AppSpec(config, Schema.from_options(config.data))
    write_bytes(folder / CONFIG, config.toml().encode())
    return spec


def reject_attack(config: Config) -> None:
    """Raises InputError if a config has a table [attack], which is for simulation only."""
    if config.attack is not None:
        raise InputError(
            f"[attack] '{config.attack['name']}' is for simulation only: take it out of the config."
        )


def reject_own_models(config: Config) -> None:
    """Raises InputError for `[personalize]` where clients have models of their own already."""
    if config.personalize is None:
        return
    name = config.algorithm["name"]
    if config.ensemble.personal or build_algorithm(config.algorithm).personal:
        what = "personal parts" if config.ensemble.personal else f"'{name}'"
        raise InputError(
            f"[personalize] on a fleet compares modes that are equal for all clients, and with "
            f"{what} each client has its own: take the table [personalize] out of the config."
        )


def read_app_spec(folder: Path) -> AppSpec:
    """Returns the specification in an app's folder; raises if this machine cannot run the app."""
    check_requirements(folder)  # first, because without a package its model is unknown
    config = resolve(read_toml(folder / CONFIG), str(folder / CONFIG))
    reject_attack(config)
    reject_own_models(config)
    if config.data["source"] != "schema":
        raise InputError(
            f"{folder / CONFIG} has data.source = '{config.data['source']}', and the server of a "
            "fleet has no data: write the app again with fedensemble deploy, or give a schema."
        )
    return AppSpec(config, Schema.from_options(config.data))


def load_file(folder: Path, file: str | Path) -> tuple[Any, Any]:
    """Returns inputs and targets of a site's .npz or .csv file, read as the app's schema says."""
    return read_examples(Path(str(file)).expanduser(), read_app_spec(folder).schema)


def example_client(folder: Path, node: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns inputs and targets of client `partition-id` in the dataset of example.toml."""
    if not (folder / EXAMPLE).exists():
        raise InputError(
            "This SuperNode was started without a file of examples: give --node-config "
            "'data=\"/srv/mine.csv\"', or write load() in the app's data.py."
        )
    config = read_app_spec(folder).config
    values = {**config.values(), **read_toml(folder / EXAMPLE)}
    # The rows of the example are whole, so that these would have none.
    for table in ("calibration", "personalize"):
        values.pop(table, None)
    data, partition = build_data(resolve(values)), node.get("partition-id")
    if not isinstance(partition, int) or not 0 <= partition < len(data):
        raise InputError(
            f"The example data have clients 0 to {len(data) - 1}; got partition-id {partition}. "
            "Start the SuperNode with --node-config 'partition-id=0', or change load() in data.py."
        )
    return data.client(partition)
