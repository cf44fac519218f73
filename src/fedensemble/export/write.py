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
from ..uncertainty.abstention import require_share, risk_threshold
from ..version import VERSION
from . import onnx_model, torch_program
from .example_inputs import ROWS, example_inputs
from .inference_module import ANSWERED, INTERVAL, SETS, InferenceModule
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
        lost_calibration: whether the ensemble is calibrated and the file is not, because it has
            only some of the modes.
    """

    path: Path
    bytes: int
    models: int
    outputs: tuple[str, ...]
    difference: float | None
    ranking: ModeRanking | None = None
    lost_calibration: bool = False

    def __str__(self) -> str:
        checked = (
            "not compared with predict(), because onnxruntime is not installed"
            if self.difference is None
            else f"differs from predict() by at most {self.difference:.1g}"
        )
        models = count(self.models, "model")
        lost = "; not calibrated: a calibration of all modes is not valid for some of them"
        text = f"{models} written to {self.path} ({size(self.bytes)}); {checked}"
        return text + (lost if self.lost_calibration else "")


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
    client: str | int | None = None,
    risk: float | None = None,
) -> ExportedFile:
    """Writes the file; see `Ensemble.export`."""
    file = check_path(path)
    if ensemble.dropout_samples:
        raise InputError(
            "MC-dropout cannot be exported: a file has no keyed random masks. Export the models "
            "without dropout: load the ensemble in Python, and set its dropout_samples to 0 before "
            "you call export()."
        )
    chosen, ranking = choose_modes(ensemble, modes, validation)
    calibrated = ensemble.calibration is not None
    ensemble = ensemble if chosen is None else ensemble.select(chosen)
    most_entropy = None if risk is None else _most_entropy(ensemble, risk, chosen)
    if client is not None and (ensemble.calibration is None or not ensemble.calibration.has_sets):
        raise InputError(
            "client is for an ensemble that was calibrated for each client; this one was not. "
            "Leave it out."
        )
    if not 0 < tolerance < math.inf:
        raise InputError(f"export() needs a tolerance above 0; got {tolerance}.")
    as_onnx = file.suffix == ".onnx"
    if as_onnx:
        onnx_model.require_onnx()  # before the work
    inputs = example_inputs(ensemble, examples)
    module = InferenceModule(ensemble, client, most_entropy)
    # Before tracing: predict() rejects inputs that do not fit, in words of its own.
    ensemble.predict(inputs[:1])
    program = torch_program.trace(module, inputs[:ROWS])
    facts, names = describe(ensemble, inputs), module.output_names
    facts |= describe_calibration(module, client, risk)
    if chosen is not None:
        facts["selected_modes"] = list(chosen)
    if as_onnx:
        content = onnx_model.to_bytes(program, names, facts, type(module.models[0]).__name__)
        loaded = onnx_model.load(content)
    else:
        content = torch_program.to_bytes(program, facts)
        loaded = torch_program.load(content)
    difference = None if loaded is None else _compare(ensemble, module, inputs, loaded)
    if difference is not None and not difference <= tolerance:
        raise InputError(
            f"The exported models differ from predict() by {difference:.2g}, which is more than "
            f"{tolerance:g}; {file} was not written. If the model is sensitive to rounding, train "
            "it in float64 or pass a larger tolerance; otherwise an operation in forward() means "
            "something else in the file: write the other format."
        )
    write_bytes(file, content)
    lost = calibrated and ensemble.calibration is None
    return ExportedFile(file, len(content), len(module.models), names, difference, ranking, lost)


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


def _most_entropy(ensemble: Ensemble, risk: float, chosen: tuple[int, ...] | None) -> float:
    """The largest entropy at which an ensemble answers with at most this share of errors."""
    if ensemble.calibration is None:
        of_all = ", and a calibration of all modes is not valid for some of them" if chosen else ""
        raise InputError(
            f"risk needs a calibrated ensemble{of_all}: call Federation.calibrate(), or "
            "`fedensemble calibrate` with the folder of the run."
        )
    rows = ensemble.calibration.abstention_rows("entropy")
    return risk_threshold(*rows, require_share("risk", risk))


def describe_calibration(
    module: InferenceModule, client: str | int | None, risk: float | None
) -> dict[str, Any]:
    """The facts in the file about a calibration; empty without one."""
    facts: dict[str, Any] = {}
    if module.place is not None:
        facts |= {"temperature": module.place, "temperatures": list(module.temperatures)}
    if module.calibration is not None:
        settings = module.calibration.settings
        facts |= {"method": settings.method, "alpha": settings.alpha, "scope": settings.scope}
        facts["thresholds"] = module.threshold[0].tolist()
        facts |= {} if client is None else {"client": client}
    if module.most_entropy is not None:
        facts |= {"risk": risk, "most_entropy": module.most_entropy}
    return facts


def _compare(
    ensemble: Ensemble,
    module: InferenceModule,
    inputs: Tensor,
    run: Callable[[Tensor], dict[str, Tensor]],
) -> float:
    """The largest difference between file and `predict`, for one input and for all examples."""
    worst = 0.0
    for batch in (inputs[:1], inputs):
        prediction = ensemble.predict(batch)
        outputs = run(batch)
        for name in outputs.keys() - {"label", SETS, INTERVAL, ANSWERED}:
            worst = max(worst, _difference(outputs[name], getattr(prediction, name)))
        if module.calibration is not None and SETS in outputs:
            # A class at the threshold may be on either side: how far its score is from it.
            scores = module.calibration.scores(prediction.mean)
            other = outputs[SETS] != (scores <= module.threshold)
            worst = max(worst, _largest((scores - module.threshold)[other]))
        if module.calibration is not None and INTERVAL in outputs:
            ends = module.calibration.interval_within(prediction.mean, module.threshold)
            worst = max(worst, _difference(outputs[INTERVAL], ends))
        if module.most_entropy is not None:
            entropy = prediction.entropy.double()
            other = outputs[ANSWERED] != (entropy <= module.most_entropy)
            worst = max(worst, _largest((entropy - module.most_entropy)[other]))
        if "label" in outputs:  # two classes of nearly the same probability may change places
            label = outputs["label"].unsqueeze(-1)
            of_label = prediction.mean.gather(-1, label).squeeze(-1)
            worst = max(worst, _difference(of_label, prediction.mean.amax(-1)))
    return worst


def _largest(values: Tensor) -> float:
    """The largest absolute value; 0 without values."""
    return float(values.abs().amax()) if values.numel() else 0.0


def _difference(value: Tensor, expected: Tensor) -> float:
    if value.shape != expected.shape:
        return math.inf
    value, expected = value.double(), expected.double()
    return _largest(value - expected) / max(1.0, _largest(expected))
