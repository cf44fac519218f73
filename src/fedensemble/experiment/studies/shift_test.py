"""Tests finished runs on inputs unlike their training data: other data, and corrupted images.

The results are in shift.json of a run's folder, one entry per evaluation and set of inputs, so that
tables share them and a killed test continues. No run is trained here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor

from ...config.build import data_table
from ...config.plugin_tables import Table, parameters
from ...config.schema import Config
from ...data import datasets
from ...data.corruptions import ABSENT, SEVERITIES
from ...display import count
from ...durable import write_json
from ...errors import DataError, InputError
from ...federation.federation import Federation
from ...metrics import BINS, MIN_PROBABILITY, ood_metrics, round_to_6_digits
from ...predict import Ensemble
from ...prediction import Prediction
from ...uncertainty.calibration_error import expected_calibration_error
from ..storage.ensemble_file import read_ensemble
from ..storage.read_json import read_table
from ..storage.run_folder import RunFolder
from .data_cache import DataCache
from .shifted_inputs import Corrupted, corrupted_images, other_images

FILE = "shift.json"
# Part of the key of each entry: raise it if the same settings give other results.
_VERSION = 1
Say = Callable[[str], None]


class ShiftTable(Table):
    """What finished runs are tested on, besides their test set; the labels are not used for OOD."""

    ood: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="data out of distribution by their name in the table: source, and its options",
    )
    ood_images: PositiveInt = Field(
        default=10_000, description="number of images of each of them, and of the test set"
    )
    corrupted_images: NonNegativeInt = Field(
        default=0, description="number of test images that each corruption changes; 0 for none"
    )


@dataclass(frozen=True)
class Part:
    """A set of inputs that an ensemble is tested on.

    Attributes:
        kind: "ood" or "corruptions".
        name: of the data out of distribution; empty for corruptions.
        settings: on which the result depends, besides the run.
    """

    kind: str
    name: str
    settings: Mapping[str, Any]

    @property
    def key(self) -> str:
        """The key of its result in the file."""
        text = json.dumps([_VERSION, self.kind, self.settings], sort_keys=True)
        return f"{self.kind}-{sha256(text.encode()).hexdigest()[:12]}"


def parts_of(table: ShiftTable, way: str) -> list[Part]:
    """The sets of inputs that a table asks for.

    Args:
        way: the evaluation, "test" or "test_last".
    """
    parts = [
        Part("ood", name, {"way": way, "data": dict(data), "images": table.ood_images})
        for name, data in table.ood.items()
    ]
    if table.corrupted_images:
        parts.append(Part("corruptions", "", {"way": way, "images": table.corrupted_images}))
    return parts


def read_shift(folder: Path, table: ShiftTable, way: str) -> dict[str, Any]:
    """The results of a run by the name of the data, and "corruptions"; without those not made yet.

    Args:
        folder: of the run.
        table: what the run is tested on.
        way: the evaluation, "test" or "test_last".
    """
    known = _entries(folder)
    results: dict[str, Any] = {"ood": {}, "corruptions": {}}
    for part in parts_of(table, way):
        if part.key in known and part.kind == "ood":
            results["ood"][part.name] = known[part.key]["result"]
        elif part.key in known:
            results["corruptions"] = known[part.key]["result"]
    return results


def _entries(folder: Path) -> dict[str, Any]:
    return read_table(folder / FILE) if (folder / FILE).is_file() else {}


class ShiftTest:
    """Tests runs one after the other; runs with the same data share their inputs.

    Args:
        say: called with a line on each step.
    """

    def __init__(self, say: Say) -> None:
        self._say, self._cache = say, DataCache()
        self._inputs: tuple[str, _Inputs] | None = None  # of the last run, by its settings
        self._missing: set[str] = set()  # settings of other data that are not available

    def test(self, label: str, config: Config, folder: Path, table: ShiftTable, way: str) -> None:
        """Tests a finished run on all inputs that it was not tested on yet.

        Args:
            label: of the run, for messages.
            config: of the run.
            folder: of the run.
            table: what it is tested on.
            way: the evaluation, "test" or "test_last".
        """
        known = _entries(folder)
        todo = [part for part in parts_of(table, way) if part.key not in known]
        todo = [part for part in todo if repr(part.settings.get("data")) not in self._missing]
        if not todo:
            return
        inputs = self._inputs_of(config, table)
        started = time.monotonic()
        ensemble = self._ensemble(config, folder, way)
        tested = _Tested(ensemble, inputs, config.evaluation.batch_size)
        for part in todo:
            try:
                result = tested.ood(part.name) if part.kind == "ood" else tested.corruptions()
            except DataError as error:
                self._missing.add(repr(part.settings.get("data")))
                self._say(f"Skipped: tests on {part.name}. {error}")
                continue
            known[part.key] = {"kind": part.kind, "settings": part.settings, "result": result}
        write_json(folder / FILE, known)
        self._say(
            f"{label}: {count(ensemble.prediction_models, 'model')} tested on shifted inputs in "
            f"{time.monotonic() - started:.1f} s."
        )

    def _inputs_of(self, config: Config, table: ShiftTable) -> _Inputs:
        settings = data_table(config)
        # Of most data, runs with other seeds have the same test set, and share its corruptions.
        if "seed" not in parameters(datasets[config.data["source"]]):
            del settings["seed"]
        key = repr((sorted(settings.items()), table.model_dump(), config.engine.device))
        if self._inputs is None or self._inputs[0] != key:
            self._inputs = None  # free the old images before the new ones are made
            self._inputs = (key, _Inputs(config, table, self._cache, self._say))
        return self._inputs[1]

    def _ensemble(self, config: Config, folder: Path, way: str) -> Ensemble:
        if way == "test":
            return read_ensemble(
                RunFolder(folder).modes_file, config, torch.device(config.engine.device)
            )
        if way != "test_last":
            raise InputError(f"Runs are tested on shifted inputs by test or test_last; got {way}.")
        # Only the checkpoint has the modes without the average. Its data must be those of its seed.
        federation = Federation.load(folder, data=self._cache.build_data(config))
        return federation.last_ensemble or federation.ensemble


class _Inputs:
    """The test set of a row's runs, other data in its shape, and its corrupted images."""

    def __init__(self, config: Config, table: ShiftTable, cache: DataCache, say: Say) -> None:
        data = cache.build_data(config)
        if data.x_test is None or data.y_test is None:
            raise DataError("Tests on shifted inputs need a test set, and these data have none.")
        self._table, self._say = table, say
        self.name, self.device = str(config.data["source"]), torch.device(config.engine.device)
        self.x, self.y = data.x_test.cpu(), data.y_test.cpu()
        self._others: dict[str, Tensor] = {}

    @cached_property
    def inside(self) -> Tensor:
        return self.x[: self._table.ood_images].to(self.device)

    def outside(self, name: str) -> Tensor:
        if name not in self._others:
            options = dict(self._table.ood[name])
            source = options.pop("source", None)
            if not isinstance(source, str):
                raise InputError(f"Data out of distribution '{name}' need a source.")
            images = other_images(source, options, self.x.shape[1:], self._table.ood_images)
            self._others[name] = images.to(self.device)
        return self._others[name]

    @cached_property
    def corrupted(self) -> dict[str, Corrupted]:
        count, started = self._table.corrupted_images, time.monotonic()
        made = corrupted_images(self.x[:count].numpy(), self.y[:count], self.name)
        images = sum(len(each.images) for each in made.values())
        seconds = time.monotonic() - started
        self._say(f"{self.name}: {images:,} corrupted images made in {seconds:.1f} s.")
        return {
            name: Corrupted(each.images.to(self.device), each.labels.to(self.device))
            for name, each in made.items()
        }


class _Tested:
    """An ensemble and the inputs that it is tested on."""

    def __init__(self, ensemble: Ensemble, inputs: _Inputs, batch_size: int) -> None:
        self._ensemble, self._inputs, self._batch_size = ensemble, inputs, batch_size

    def _predict(self, x: Tensor) -> Prediction:
        return self._ensemble.predict(x, batch_size=self._batch_size, on_device=True)

    @cached_property
    def _inside(self) -> Prediction:
        return self._predict(self._inputs.inside)

    def ood(self, name: str) -> dict[str, dict[str, float]]:
        found = ood_metrics(self._inside, self._predict(self._inputs.outside(name)))
        return {
            score: {metric: float(f"{value:.6g}") for metric, value in values.items()}
            for score, values in found.items()
        }

    def corruptions(self) -> dict[str, Any]:
        """Metrics by corruption and severity, and the corruptions that are absent."""
        results: dict[str, dict[str, dict[str, float]]] = {}
        for name, corrupted in self._inputs.corrupted.items():
            means = torch.split(self._predict(corrupted.images).mean, len(corrupted.labels))
            results[name] = {
                str(severity): label_metrics(mean, corrupted.labels)
                for severity, mean in zip(SEVERITIES, means, strict=True)
            }
        return {"metrics": results, "absent": dict(ABSENT)}


def label_metrics(mean: Tensor, target: Tensor) -> dict[str, float]:
    """Accuracy, NLL and ECE of class probabilities [n, C], as `evaluate` computes them.

    They are three of its many metrics, and the only ones that tables of corruptions need.
    """
    mean = mean.double()
    of_target = mean.gather(1, target.unsqueeze(1)).squeeze(1)
    return {
        "accuracy": round_to_6_digits((mean.argmax(-1) == target).double().mean()),
        "nll": round_to_6_digits(-of_target.clamp(min=MIN_PROBABILITY).log().mean()),
        "ece": round_to_6_digits(expected_calibration_error(mean, target, BINS)),
    }
