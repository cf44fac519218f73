"""Implements `fedensemble predict`: reads inputs, writes predictions."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...checkpoint_file import write_bytes
from ...errors import InputError, unknown
from ...experiment.storage.ensemble_file import load_ensemble
from ...prediction import Prediction
from ...uncertainty.abstention import Abstention
from ...uncertainty.scores import SCORES
from ..inputs import read_new_inputs
from .personalize import predict_for_client


@dataclass(frozen=True)
class AbstentionRule:
    """Which rows to leave unanswered; none if nothing sets a threshold.

    Args:
        above: rows with a larger uncertainty are not answered.
        coverage: share of the rows to answer.
        risk: largest share of errors among the answered rows; needs a calibrated run.
        score: measure of uncertainty; None for the entropy.
    """

    above: float | None = None
    coverage: float | None = None
    risk: float | None = None
    score: str | None = None

    def check(self) -> None:
        """Raises for options that contradict each other, before anything is predicted."""
        given = {
            "--abstain-above": self.above,
            "--coverage": self.coverage,
            "--risk": self.risk,
        }
        names = [name for name, value in given.items() if value is not None]
        if len(names) > 1:
            raise InputError(f"{' and '.join(names)} each set a threshold: give one.")
        if self.score is not None and not names:
            raise InputError("--score needs --risk, --abstain-above or --coverage.")
        if self.score is not None and self.score not in SCORES:
            raise InputError(unknown("score", self.score, SCORES))

    def apply(self, prediction: Prediction) -> Abstention | None:
        """Which rows of the prediction are answered; None if all are."""
        score: Any = self.score or "entropy"
        if self.risk is not None:
            if prediction.calibration is None:
                raise InputError(
                    "--risk needs a calibrated run: `fedensemble calibrate` with its folder finds "
                    "how often answers are wrong. Without it, use --abstain-above or --coverage."
                )
            return prediction.abstain(risk=self.risk, score=score)
        if self.above is not None:
            return prediction.abstain(threshold=self.above, score=score)
        if self.coverage is None:
            return None
        return prediction.abstain(coverage=self.coverage, score=score)


def predict_file(
    run: Path,
    inputs: Path,
    output: Path,
    *,
    members: bool,
    device: str,
    rule: AbstentionRule,
    personal: str | None = None,
    client: str | None = None,
) -> str:
    """Writes the predictions of a finished run for `inputs`; returns a sentence on them.

    Args:
        personal: method of a personal model; None for the ensemble.
        client: of the personal model, or of the prediction sets.
    """
    if personal is not None and client is None:
        raise InputError(
            "A personal model needs its method and its client: --personal select --client 3."
        )
    if output.suffix not in (".npz", ".csv"):
        raise InputError(
            f"Predictions are written as .npz or .csv; got '{output}'. Use a name for -o that ends "
            "in one of them."
        )
    if members and output.suffix == ".csv":
        raise InputError("--members needs an .npz file, because a table has no place for them.")
    if not output.parent.is_dir():
        raise InputError(
            f"There is no folder {output.parent} to write {output.name} to. "
            "Create it, or change -o."
        )
    rule.check()
    ensemble = load_ensemble(run, device)
    if client is not None and personal is None:
        made = ensemble.calibration
        if made is None or not made.client_thresholds:
            raise InputError(
                "--client needs --personal, or a run that was calibrated for each client: "
                "fedensemble calibrate RUN --scope client."
            )
    x, files = read_new_inputs(inputs, run, ensemble)
    prediction = (
        ensemble.predict(x, client=as_client(client))
        if personal is None
        else predict_for_client(run, ensemble, x, personal, str(client))
    )
    abstention = rule.apply(prediction)
    if output.suffix == ".csv":
        write_bytes(output, to_csv(prediction, abstention, files).encode())
    else:
        content = io.BytesIO()
        arrays = to_arrays(prediction, abstention, members=members)
        if files is not None:
            arrays["file_name"] = np.array(files)  # `file` is an argument of savez
        np.savez(content, allow_pickle=False, **arrays)
        write_bytes(output, content.getvalue())
    sentence = f"{len(prediction.mean)} predictions written to {output}"
    if abstention is None:
        return sentence
    answered, total = int(abstention.answered.sum()), abstention.answered.numel()
    return (
        f"{sentence}; {answered} of {total} answered, those with {abstention.score} of at most "
        f"{abstention.threshold:.6g}"
    )


def as_client(name: str | None) -> str | int | None:
    """The name of a client, or its index if the text is a number."""
    return int(name) if name is not None and name.removeprefix("-").isdecimal() else name


def to_arrays(
    prediction: Prediction, abstention: Abstention | None = None, *, members: bool = False
) -> dict[str, NDArray[Any]]:
    """Returns the arrays of an .npz file.

    With an abstention, unanswered rows have label -1 and an empty name; `answered`, `score` (a
    name), `uncertainty` and `threshold` say why.
    """
    arrays = {"mean": prediction.mean}
    if prediction.task == "classification":
        arrays |= {
            "label": prediction.label if abstention is None else abstention.label,
            "entropy": prediction.entropy,
            "mutual_information": prediction.mutual_information,
        }
    else:
        arrays["variance"] = prediction.variance
    if _has_sets(prediction):
        classification = prediction.task == "classification"
        arrays["sets" if classification else "interval"] = (
            prediction.sets if classification else prediction.interval
        )
    if members:
        arrays |= {"members": prediction.members, "mode_index": prediction.mode_index}
    values: dict[str, NDArray[Any]] = {name: tensor.numpy() for name, tensor in arrays.items()}
    if prediction.class_names is not None:
        values |= {
            "label_name": prediction.label_names,
            "class_names": np.array(prediction.class_names),
        }
    if abstention is not None:
        answered = abstention.answered.numpy()
        if "label_name" in values:
            values["label_name"] = np.where(answered, values["label_name"], "")
        values |= {
            "answered": answered,
            "uncertainty": abstention.uncertainty.numpy(),
            "threshold": np.array(abstention.threshold),
            "score": np.array(abstention.score),
        }
    return values


def _has_sets(prediction: Prediction) -> bool:
    """Whether the ensemble was calibrated with prediction sets or intervals."""
    return prediction.calibration is not None and prediction.calibration.has_sets


def to_csv(
    prediction: Prediction,
    abstention: Abstention | None = None,
    files: Sequence[str] | None = None,
) -> str:
    """Returns a table with one row per input.

    For classification its columns are label, label_name (if the classes have names), entropy,
    mutual_information and the probability of each class; for regression the mean and the variance
    of each output. A calibrated ensemble adds the prediction set, as names separated by "|", and
    its size, or the ends of the interval.

    With an abstention, unanswered rows have an empty label, and the columns after the label say
    whether a row is answered and, if not, the reason. If each input is a file, the first column
    has its name.
    """
    mean = prediction.mean.reshape(len(prediction.mean), -1)
    if prediction.task == "classification":
        if prediction.mean.dim() != 2:
            raise InputError(
                "A .csv has one label per row, and these predictions have one per position of a "
                "sequence. Use a name for -o that ends in .npz."
            )
        columns: dict[str, list[Any]] = {"label": prediction.label.tolist()}
        if prediction.class_names is not None:
            columns["label_name"] = prediction.label_names.tolist()
        if abstention is not None:
            columns = _with_reasons(columns, abstention)
        columns |= {
            "entropy": prediction.entropy.tolist(),
            "mutual_information": prediction.mutual_information.tolist(),
        }
        if _has_sets(prediction):
            columns |= {
                "set": ["|".join(classes) for classes in prediction.set_names],
                "set_size": prediction.sets.sum(1).tolist(),
            }
        names = prediction.class_names or [str(number) for number in range(mean.shape[1])]
        columns |= {f"p({name})": mean[:, c].tolist() for c, name in enumerate(names)}
    else:
        variance = prediction.variance.reshape(len(mean), -1)
        one = mean.shape[1] == 1
        columns = {}
        for output in range(mean.shape[1]):
            columns["mean" if one else f"mean_{output}"] = mean[:, output].tolist()
            columns["variance" if one else f"variance_{output}"] = variance[:, output].tolist()
        if _has_sets(prediction):
            columns |= dict(zip(("lower", "upper"), prediction.interval.T.tolist(), strict=True))
    if files is not None:
        columns = {"file": list(files), **columns}
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(
        [f"{value:.6g}" if isinstance(value, float) else value for value in row]
        for row in zip(*columns.values(), strict=True)
    )
    return table.getvalue()


def _with_reasons(columns: dict[str, list[Any]], abstention: Abstention) -> dict[str, list[Any]]:
    """Returns the columns of labels, empty for unanswered rows, with columns that say why."""
    answered, limit = abstention.answered.tolist(), f"{abstention.threshold:.6g}"
    blank = {
        name: [cell if known else "" for cell, known in zip(cells, answered, strict=True)]
        for name, cells in columns.items()
    }
    reasons = [
        "" if known else f"{abstention.score} {value:.6g} > {limit}"
        for value, known in zip(abstention.uncertainty.tolist(), answered, strict=True)
    ]
    words = ["yes" if known else "no" for known in answered]
    return {**blank, "answered": words, "reason": reasons}
