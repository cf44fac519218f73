"""Writes an ensemble as .onnx or .pt2, and checks the file against `Ensemble.predict`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..display import count, size
from ..durable import write_bytes
from ..errors import InputError
from ..text import as_path
from ..version import VERSION
from . import onnx_model, torch_program
from .example_inputs import ROWS, example_inputs
from .inference_module import InferenceModule
from .mode_ranking import ModeRanking, choose_modes

if TYPE_CHECKING:
    from ..predict import Ensemble

SUFFIXES = (".onnx", ".pt2")
TOLERANCE = 1e-5


@dataclass(frozen=True)
class ExportedFile:
    """A file that `Ensemble.export` wrote.

    Args:
        path: of the file.
        bytes: its size.
        models: number of models in it, K * S.
        outputs: their names.
        difference: largest difference to `Ensemble.predict`, relative to the largest value of an
            output where that is above 1; None if ONNX Runtime is not installed.
        ranking: what "best:3" chose from; None otherwise.
    """

    path: Path
    bytes: int
    models: int
    outputs: tuple[str, ...]
    difference: float | None
    ranking: ModeRanking | None = None

    def __str__(self) -> str:
        checked = (
            "not compared with predict(), because onnxruntime is not installed"
            if self.difference is None
            else f"differs from predict() by at most {self.difference:.1g}"
        )
        models = count(self.models, "model")
        return f"{models} written to {self.path} ({size(self.bytes)}); {checked}"


def check_path(path: str | Path) -> Path:
    """The path of a file to write; raises unless its name and its folder are right."""
    file = as_path(path)
    if file.suffix not in SUFFIXES:
        raise InputError(
            f"An ensemble is exported as .onnx or .pt2 (torch.export); got '{file}'. Use a name "
            "that ends in one of them."
        )
    if not file.parent.is_dir():
        raise InputError(
            f"There is no folder {file.parent} to write {file.name} to. Create it, or change the "
            "path."
        )
    return file


def export_ensemble(
    ensemble: Ensemble,
    path: str | Path,
    modes: str | Sequence[int] | None,
    validation: tuple[Any, Any] | None,
    examples: Any,
    tolerance: float,
) -> ExportedFile:
    """Writes the file; see `Ensemble.export`."""
    file = check_path(path)
    chosen, ranking = choose_modes(ensemble, modes, validation)
    ensemble = ensemble if chosen is None else ensemble.select(chosen)
    if not 0 < tolerance < math.inf:
        raise InputError(f"export() needs a tolerance above 0; got {tolerance}.")
    as_onnx = file.suffix == ".onnx"
    if as_onnx:
        onnx_model.require_onnx()  # before the work
    inputs, module = example_inputs(ensemble, examples), InferenceModule(ensemble)
    # Before tracing: predict() rejects inputs that do not fit, in words of its own.
    ensemble.predict(inputs[:1])
    program = torch_program.trace(module, inputs[:ROWS])
    facts, names = describe(ensemble, inputs), module.output_names
    if chosen is not None:
        facts["selected_modes"] = list(chosen)
    if as_onnx:
        content = onnx_model.to_bytes(program, names, facts, type(module.models[0]).__name__)
        loaded = onnx_model.load(content)
    else:
        content = torch_program.to_bytes(program, facts)
        loaded = torch_program.load(content)
    difference = None if loaded is None else _compare(ensemble, inputs, loaded)
    if difference is not None and not difference <= tolerance:
        raise InputError(
            f"The exported models differ from predict() by {difference:.2g}, which is more than "
            f"{tolerance:g}; {file} was not written. If the model is sensitive to rounding, train "
            "it in float64 or pass a larger tolerance; otherwise an operation in forward() means "
            "something else in the file: write the other format."
        )
    write_bytes(file, content)
    return ExportedFile(file, len(content), len(module.models), names, difference, ranking)


def describe(ensemble: Ensemble, inputs: Tensor) -> dict[str, Any]:
    """The facts in the file: what goes in, what comes out, and what the models are."""
    samples = ensemble.predictors.shape[1]
    return {
        "fedensemble_version": VERSION,
        "task": ensemble.model.task,
        "combine": ensemble.combine,
        "modes": len(ensemble),
        "mode_index": [mode for mode in range(len(ensemble)) for _ in range(samples)],
        "model": type(ensemble.model.eval_model).__name__,
        "input_shape": list(inputs.shape[1:]),
        "input_dtype": str(inputs.dtype).removeprefix("torch."),
        "class_names": list(ensemble.class_names or ()),
        "feature_names": list(ensemble.feature_names or ()),
    }


def _compare(
    ensemble: Ensemble, inputs: Tensor, run: Callable[[Tensor], dict[str, Tensor]]
) -> float:
    """The largest difference between file and `predict`, for one input and for all examples."""
    worst = 0.0
    for batch in (inputs[:1], inputs):
        prediction = ensemble.predict(batch)
        outputs = run(batch)
        for name in outputs.keys() - {"label"}:
            worst = max(worst, _difference(outputs[name], getattr(prediction, name)))
        if "label" in outputs:  # two classes of nearly the same probability may change places
            label = outputs["label"].unsqueeze(-1)
            of_label = prediction.mean.gather(-1, label).squeeze(-1)
            worst = max(worst, _difference(of_label, prediction.mean.amax(-1)))
    return worst


def _difference(value: Tensor, expected: Tensor) -> float:
    if value.shape != expected.shape:
        return math.inf
    value, expected = value.double(), expected.double()
    largest = float(expected.abs().amax()) if expected.numel() else 0.0
    difference = float((value - expected).abs().amax()) if expected.numel() else 0.0
    return difference / max(1.0, largest)
