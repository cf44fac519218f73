"""Distils the ensemble of a run into one model, which becomes a run folder of its own.

The folder has the files of a finished run except checkpoints and records of rounds, so that
predictions, exports and reports work. `distillation.json` says how it was made, and compares it
with the ensemble.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tomli_w
from torch import Tensor

from .. import durable
from ..checkpoint_file import read_checkpoint
from ..config.build import build_data, build_model
from ..config.python_parts import python_parts, without_parts
from ..config.schema import Config, resolve
from ..config.toml import with_settings
from ..data import FederatedData
from ..distillation.distill import DistillSettings, OnEpoch, distill
from ..durable import json_bytes
from ..errors import InputError, StoreError
from ..metrics import evaluate, ood_metrics
from ..modeling.factory import ModelFactory
from ..predict import Ensemble
from ..prediction import Prediction
from ..uncertainty.out_of_distribution import shuffle_features
from .prediction_summary import compact_bytes, describe_predictions
from .records import environment
from .storage.checksums import FILE as CHECKSUMS
from .storage.ensemble_file import load_ensemble, read_model_facts, write_modes
from .storage.ensemble_file_checks import check_facts
from .storage.read_json import read_bytes
from .storage.run_folder import RunFolder

SHUFFLED = "test inputs with each feature shuffled over the rows"
_GIVE_INPUTS = "Give inputs without labels: --inputs inputs.npz with an array x."


def distill_run(
    run: Path,
    out: Path | None,
    settings: DistillSettings,
    *,
    inputs: Any = None,
    ood: tuple[str, Any] | None = None,
    model_settings: Sequence[str] = (),
    device: str = "cpu",
    on_epoch: OnEpoch = lambda epoch, loss: None,
) -> tuple[Path, dict[str, Any]]:
    """Writes the folder of a distilled model; returns its path and the content of its facts.

    Args:
        run: folder of the run with the ensemble.
        out: folder to write; None for the run's folder with "-plain" or "-dirichlet" at its end.
        settings: of the training.
        inputs: unlabelled; None for those of the server in the run's data.
        ood: name and values of inputs unlike the training data, to compare scores of uncertainty
            on; None shuffles the features of the test inputs.
        model_settings: settings such as "model.hidden=[32]", for another architecture.
        device: to train on.
        on_epoch: called after each epoch with the number of epochs so far and the mean loss.
    """
    store = RunFolder(run)
    values = store.read_config()
    ensemble, summary = load_ensemble(run, device), store.summary()
    target = RunFolder(out or run.with_name(f"{run.resolve().name}-{settings.kind}"))
    _check_target(target, run)
    parts = python_parts(values)
    config = resolve(without_parts(values, *parts) if parts else values, str(store.config_file))
    data = None if "data" in parts or config.data["source"] == "schema" else build_data(config)
    x = _inputs(run, data) if inputs is None else inputs
    if ood is not None:
        ensemble.predict(ood[1][:1])  # before the training: raises if they do not fit
    new_values, model = _other_model(store, values, parts, model_settings)
    # What loads the folder must not ask the student with the masks of MC-dropout.
    table = {k: v for k, v in new_values["ensemble"].items() if k != "dropout_samples"}
    new_values = {**new_values, "ensemble": table}
    began = time.perf_counter()
    made = distill(ensemble, x, settings, model, on_epoch)
    facts: dict[str, Any] = {
        "teacher": {
            "path": str(run),
            "name": summary["name"],
            "modes": len(ensemble),
            "models": ensemble.prediction_models,
            "bytes": ensemble.prediction_bytes,
        },
        "student": {"models": 1, "bytes": made.ensemble.prediction_bytes, "start": made.start},
        "settings": {name: v for name, v in asdict(settings).items() if v is not None},
        "inputs": len(x),
        "seconds": round(time.perf_counter() - began, 3),
        "loss": [float(f"{loss:.6g}") for loss in made.losses],
    }
    prediction = _compare(facts, config, ensemble, made.ensemble, data, ood)
    with target.locked():
        # Without a summary, the folder is unfinished: what a killed process leaves is no result.
        durable.remove(target.summary_file, target.path / CHECKSUMS)
        target.write(target.distillation_file, json_bytes(facts))
        target.write(target.config_file, tomli_w.dumps(new_values).encode())
        target.write(
            target.path / "env.json",
            json_bytes({**environment(config), "distilled_from": str(run)}),
        )
        if store.clients_file.exists():
            target.write(target.clients_file, read_bytes(store.clients_file))
        durable.remove(target.predictions_file)
        if prediction is not None and data is not None and data.y_test is not None:
            content = describe_predictions(prediction, data.y_test, config.report.publish_targets)
            target.write(target.predictions_file, compact_bytes(content))
        read = check_facts(store.modes_file, read_checkpoint(store.modes_file)[1])
        kept = {name: read[name] for name in ("model", "categories") if read[name]}
        write_modes(target.modes_file, made.ensemble, kept)
        target.finish(_summary(summary, made.ensemble, settings, facts))
    return target.path, facts


def _check_target(target: RunFolder, run: Path) -> None:
    """Raises unless the folder is new, empty, or holds a distilled model, which is replaced."""
    path = target.path
    if path.resolve() == run.resolve():
        raise InputError(f"{path} holds the ensemble itself. Choose another -o.")
    if path.exists() and not path.is_dir():
        raise StoreError(f"{path} is a file; a distilled model needs a folder. Choose another -o.")
    if path.is_dir() and any(path.iterdir()) and not target.is_distilled:
        raise StoreError(f"{path} holds other files. Choose another -o, or delete the folder.")


def _inputs(run: Path, data: FederatedData | None) -> Tensor:
    """The unlabelled inputs of the server; raises if the run's data have none."""
    if data is None:
        raise InputError(f"The data of {run} cannot be built from its config. {_GIVE_INPUTS}")
    if data.x_server is None:
        raise InputError(
            f"The data of {run} have no unlabelled inputs of the server. {_GIVE_INPUTS} Or train "
            "with data.server_share = 0.1, which keeps a tenth of the training rows from the "
            "clients and drops their labels, or with data.server_file."
        )
    return data.x_server


def _other_model(
    store: RunFolder, values: dict[str, Any], parts: Sequence[str], settings: Sequence[str]
) -> tuple[dict[str, Any], ModelFactory | None]:
    """The settings of the distilled model, and its factory if it is not that of the modes."""
    if not settings:
        return values, None
    wrong = [text for text in settings if text.partition("=")[0].split(".")[0].strip() != "model"]
    if wrong:
        raise InputError(
            f"distill only changes the model: --set model.hidden=[32]; got --set {wrong[0]}."
        )
    others = [part for part in parts if part != "model"]
    changed = with_settings(values, settings)
    plain = without_parts(changed, *others) if others else changed
    config = resolve({k: v for k, v in plain.items() if k != "python"}, "the distilled model")
    changed = {**changed, "model": config.values()["model"]}
    if "python" in changed:
        changed["python"] = others
    return changed, build_model(config.model, read_model_facts(store.modes_file))


def _compare(
    facts: dict[str, Any],
    config: Config,
    ensemble: Ensemble,
    student: Ensemble,
    data: FederatedData | None,
    ood: tuple[str, Any] | None,
) -> Prediction | None:
    """Adds metrics of both to the facts; returns the student's prediction for the test set."""
    if data is None or data.x_test is None or data.y_test is None:
        return None
    batch_size, x = config.evaluation.batch_size, data.x_test
    both = {"teacher": ensemble, "student": student}
    inside = {name: each.predict(x, batch_size=batch_size) for name, each in both.items()}
    for name, prediction in inside.items():
        facts[name]["test"] = evaluate(prediction, data.y_test)
    if ensemble.model.task == "classification":
        what, unlike = ood or (SHUFFLED, shuffle_features(x, config.seed))
        facts["ood_inputs"] = {"what": what, "count": len(unlike)}
        for name, each in both.items():
            outside = each.predict(unlike, batch_size=batch_size)
            facts[name]["ood"] = ood_metrics(inside[name], outside)
    return inside["student"]


def _summary(
    summary: dict[str, Any], student: Ensemble, settings: DistillSettings, facts: dict[str, Any]
) -> dict[str, Any]:
    """The summary of the distilled model: its own results, and what training the modes took."""
    kept = ("hash", "rounds", "bytes_up", "bytes_down", "task", "data", "clock", "combine")
    return {
        "name": f"{summary['name']}, distilled ({settings.kind})",
        **{key: summary[key] for key in kept if key in summary},
        "modes": 1,
        "parameters": student.model.theta_layout.total,
        "prediction_models": student.prediction_models,
        "prediction_bytes": student.prediction_bytes,
        "seconds": facts["seconds"],
        **({"test": facts["student"]["test"]} if "test" in facts["student"] else {}),
    }
