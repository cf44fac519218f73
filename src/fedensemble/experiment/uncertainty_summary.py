"""What the report shows of prediction sets, inputs out of distribution and unsure examples."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..client_metrics import INTERVALS, SETS, evaluate_clients
from ..config.build import load_source
from ..data import FederatedData, datasets
from ..data.convert import as_inputs, as_tensor
from ..errors import InputError, unknown
from ..metrics import ood_metrics
from ..predict import Ensemble
from ..prediction import Prediction
from .studies.shifted_inputs import other_images

OOD_BINS = 30
MOST_CLIENTS = 200  # whose coverage is shown
MOST_SIZES = 20  # of prediction sets, in the histogram; larger ones share the last bar
EXAMPLES = 12  # of the most uncertain inputs
MOST_PIXELS = 64  # side of an example's picture; larger images are left out
# Images that anyone can look up. Pictures of other data are published only if the config says so.
PUBLIC_IMAGES = {
    "cifar10",
    "cifar100",
    "digits",
    "fashion-mnist",
    "mnist",
    "openimage",
    "stand-in-images",
}
Record = dict[str, Any]


def describe_sets(
    prediction: Prediction,
    targets: Tensor,
    owner: Tensor | None = None,
    names: Sequence[str] | None = None,
    publish: bool = True,
) -> Record:
    """Returns sizes of prediction sets or intervals, and coverage and size of each client.

    Empty if the ensemble makes none.

    Args:
        prediction: for the test set.
        targets: of the test set.
        owner: index of the client of each test row, or None; -1 for a row of none.
        names: of the clients, or None.
        publish: whether to include values of single clients.
    """
    made = prediction.calibration
    if made is None or not made.has_sets:
        return {}
    record: Record = {"task": prediction.task, "level": 1 - made.settings.alpha}
    if prediction.task == "classification":
        size = prediction.sets.sum(1).clamp(max=MOST_SIZES)
        length = min(prediction.sets.shape[1], MOST_SIZES) + 1
        record["sizes"] = torch.bincount(size, minlength=length).tolist()
    if owner is None or not bool((owner >= 0).any()):
        return record
    found = evaluate_clients(prediction, targets, owner)
    tested = torch.nonzero(found.rows > 0).flatten()
    keys = SETS if prediction.task == "classification" else INTERVALS
    coverage, size = (found.values[key][tested] for key in keys)
    order = coverage.argsort(stable=True)
    # The same number as `ClientMetrics.summary` says.
    record["worst_tenth"] = float(coverage[order][: math.ceil(len(order) / 10)].mean())
    if publish:
        # Of many clients, evenly spaced ones from the worst to the best.
        if len(order) > MOST_CLIENTS:
            order = order[torch.linspace(0, len(order) - 1, MOST_CLIENTS).round().long()]
        shown = tested[order].tolist()
        record["clients"] = {
            "count": len(tested),
            "names": [str(client) if names is None else names[client] for client in shown],
            "rows": found.rows[shown].tolist(),
            "coverage": _short(coverage[order]),
            "size": _short(size[order]),
        }
    elif math.ceil(len(tested) / 10) < 5:  # the mean of few clients says much about each
        del record["worst_tenth"]
    return record


def load_ood(table: Mapping[str, Mapping[str, Any]], data: FederatedData) -> dict[str, Any]:
    """Returns the inputs of data out of distribution by name, in the shape of the test set.

    Images of another size or number of channels are converted. At most as many inputs are returned
    as the test set has.

    Args:
        table: `evaluation.ood`: for each name a source and its options.
        data: of the run.
    """
    if data.x_test is None:
        raise InputError("evaluation.ood needs a test set, and these data have none.")
    shape, most = tuple(data.x_test.shape[1:]), len(data.x_test)
    found = {}
    for name, settings in table.items():
        source = str(settings.get("source"))
        if source not in datasets:
            raise InputError(f"evaluation.ood.{name}: {unknown('dataset', source, datasets)}")
        options = {key: value for key, value in settings.items() if key != "source"}
        inputs = load_source(source, options).x_test
        if inputs is not None and tuple(inputs.shape[1:]) == shape:
            found[name] = as_inputs(as_tensor(inputs)[:most])
            continue
        try:
            found[name] = other_images(source, options, shape, most)
        except InputError as error:
            raise InputError(f"evaluation.ood.{name}: {error}") from None
    return found


def describe_ood(
    prediction: Prediction, others: Mapping[str, Any], ensemble: Ensemble, batch_size: int
) -> Record:
    """Returns histograms of all scores for the test set and for each other set, with AUROC.

    Args:
        prediction: for the test set.
        others: inputs by name.
        ensemble: that predicts.
        batch_size: of predictions.
    """
    record: Record = {}
    for name, inputs in others.items():
        other = ensemble.predict(inputs, batch_size=batch_size)
        scores = {}
        for score, metrics in ood_metrics(prediction, other).items():
            known, new = (
                p.uncertainty(score).reshape(-1).double().cpu()  # type: ignore[arg-type]
                for p in (prediction, other)
            )
            both = torch.cat([known, new])
            low, high = float(both.min()), float(both.max())
            high = high if high > low else low + 1
            scores[score] = {
                "low": low,
                "high": high,
                "known": torch.histc(known, OOD_BINS, low, high).long().tolist(),
                "other": torch.histc(new, OOD_BINS, low, high).long().tolist(),
                **metrics,
            }
        record[name] = {"examples": len(other.mean), "scores": scores}
    return record


def shows_inputs(publish: bool | None, data: Any) -> bool:
    """Returns whether pictures of test inputs may be in the files of a run.

    Args:
        publish: `report.publish_inputs`; None publishes those of public datasets only.
        data: of the run.
    """
    if publish is not None:
        return publish
    recipe = data.recipe if isinstance(data, FederatedData) else None
    return recipe is not None and recipe.get("source") in PUBLIC_IMAGES


def describe_unsure(prediction: Prediction, targets: Tensor, inputs: Tensor) -> list[Record]:
    """Returns the test images of the highest entropy, with their labels; empty without images."""
    is_image = inputs.dim() == 4 and inputs.shape[1] in (1, 3)
    if (
        prediction.task != "classification"
        or prediction.mean.dim() != 2
        or not is_image
        or not all(4 <= side <= MOST_PIXELS for side in inputs.shape[2:])
    ):
        return []
    # A byte is a brightness up to 255, unless no image has more than those of scanned digits do.
    low, high = float(inputs.min()), float(inputs.max())
    if inputs.dtype == torch.uint8:
        low, high = 0.0, 255.0 if high > 64 else max(high, 1.0)
    order = prediction.entropy.cpu().argsort(descending=True, stable=True)[:EXAMPLES]
    classes = prediction.mean.shape[1]
    names = prediction.class_names or [str(number) for number in range(classes)]
    records = []
    for row in order.tolist():
        pixels = (inputs[row].double() - low) / ((high - low) or 1.0)
        label = int(prediction.label[row])
        record: Record = {
            "png": _png((pixels * 255).round().clamp(0, 255).to(torch.uint8).numpy()),
            "label": names[label],
            "target": names[int(targets[row])],
            "probability": float(f"{float(prediction.mean[row, label]):.4g}"),
            "entropy": float(f"{float(prediction.entropy[row]):.4g}"),
        }
        if prediction.calibration is not None and prediction.calibration.has_sets:
            record["set"] = prediction.set_names[row]
        records.append(record)
    return records


def _png(image: NDArray[np.uint8]) -> str:
    """Returns an image [C, H, W] as a PNG file in base64."""
    from matplotlib.image import imsave

    colors = np.moveaxis(image, 0, -1)
    content = io.BytesIO()
    # Gray values stand for themselves: without the limits, they would be stretched.
    if colors.shape[-1] == 1:
        imsave(content, colors[..., 0], cmap="gray", vmin=0, vmax=255, format="png")
    else:
        imsave(content, colors, format="png")
    return base64.b64encode(content.getvalue()).decode()


def _short(values: Tensor) -> list[float]:
    """Returns the values with four significant digits, which keeps the file small."""
    return [float(f"{value:.4g}") for value in values.tolist()]
