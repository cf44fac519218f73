"""Predictions of many models, one by one and as stacked passes; prints one table.

    python benchmarks/prediction.py [--device cpu] [--seconds 1]

The models have random weights, and the inputs are random. "Batched" is what `Ensemble.predict`
does: stacked passes where they pay off. The ways take turns, and the fastest of each counts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from fedensemble.bench.timing import LiveTable, fastest, machine, say, write
from fedensemble.engines.stacked import prediction
from fedensemble.engines.stacked.prediction import How
from fedensemble.modeling.factory import ModelSpec
from fedensemble.modeling.functional_model import FunctionalModel
from fedensemble.models import models

ONE_LABEL = torch.zeros(1, dtype=torch.int64)
# Name, options of the model, shape of an input, models K * S, inputs, and what is active.
CASES: list[tuple[str, dict[str, object], tuple[int, ...], int, int, How]] = [
    ("rbf", {}, (1,), 40, 100, "eval"),
    ("mlp", {"hidden": [64]}, (64,), 5, 360, "eval"),
    ("mlp", {"hidden": [64]}, (64,), 5, 16, "eval"),
    ("mlp", {"hidden": [64]}, (64,), 200, 16, "eval"),
    ("mlp", {"hidden": [64]}, (64,), 200, 360, "eval"),
    ("mlp", {"hidden": [64], "dropout": 0.2}, (64,), 50, 100, "mc-dropout"),
    ("cnn", {}, (1, 28, 28), 5, 16, "eval"),
    ("cnn", {}, (1, 28, 28), 5, 1024, "eval"),
    ("cnn", {}, (1, 28, 28), 50, 256, "mc-dropout"),
    ("resnet20", {}, (3, 32, 32), 10, 256, "eval"),
]


def main() -> None:
    """Measures all cases and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each case and way")
    parser.add_argument("--out", type=Path, help="also write the table as JSON")
    options = parser.parse_args()
    table = LiveTable(
        f"Predictions of K * S models. {machine(options.device)}",
        ["model", "models", "inputs", "one by one, ms", "batched, ms", "ratio", "models per pass"],
        say,
    )
    for name, settings, shape, count, inputs, how in CASES:
        build = ModelSpec(models[name], {**settings, "shape": shape, "outputs": 10})
        if name == "rbf":
            build = ModelSpec(models[name], settings)
        loss, targets = ("mse", torch.zeros(1)) if name == "rbf" else ("cross_entropy", ONE_LABEL)
        model = FunctionalModel(build, loss, targets, options.device)
        theta, buffers = model.init_params(0, count)
        x = torch.randn(inputs, *shape, device=options.device)
        keys = None if how == "eval" else list(range(count))

        batched = partial(prediction.member_outputs, model, theta, buffers, x, how, keys)
        ways = {"apart": partial(_apart, batched), "batched": batched}
        took = fastest(ways, options.device, options.seconds)
        found = prediction._find_stackable(model, x, how)
        block = 1 if found is None else prediction._block_size(found, theta, x)
        table.add(
            f"{name}, {how}",
            str(count),
            str(inputs),
            f"{1e3 * took['apart']:.2f}",
            f"{1e3 * took['batched']:.2f}",
            f"{took['apart'] / took['batched']:.1f}",
            str(max(1, min(block, count))),
        )
    write(options.out, options.device, [table])


def _apart(predict: Callable[[], torch.Tensor]) -> None:
    """Predicts with one model after another."""
    with mock.patch.object(prediction, "_find_stackable", return_value=None):
        predict()


if __name__ == "__main__":
    main()
