"""The paper's toy regression: the uncertainty of an ensemble grows where no client has data.

python examples/regression_uncertainty.py band.png
"""

import sys
import warnings
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib.figure import Figure

import fedensemble as fe
from fedensemble.data import sources
from fedensemble.models import models

mpl.use("agg")
# The engine warns that this model takes a slower path, which is fast enough here.
warnings.simplefilter("ignore", fe.EngineWarning)
GAP = (0.2, 0.6)  # the interval of x in which no client has a point


def main(file: Path) -> None:
    """Trains ten modes, prints their error and variance, and draws the ensemble."""
    source = sources["sine"](clients=80, points=2, noise=0.1, seed=0)
    x, y, x_test, y_test = (
        torch.as_tensor(v) for v in (source.x, source.y, source.x_test, source.y_test)
    )
    # keep only clients whose points all lie outside the gap
    outside = ((x < GAP[0]) | (x > GAP[1])).reshape(-1, 2).all(1)
    clients = [
        pair
        for pair, keep in zip(zip(x.split(2), y.split(2), strict=True), outside, strict=True)
        if keep
    ]
    federation = fe.Federation(
        lambda: models["rbf"](features=50, width=0.12),
        fe.FederatedData.from_clients(clients),
        fe.FedAvg(lr=0.05),
        modes=10,
        strata=10,
        clients_per_round=20,
        epochs=5,
        batch_size=2,
        loss="mse",
        seed=0,
    )
    for _ in federation.rounds(400):
        pass
    prediction = federation.ensemble.predict(x_test)
    spread = prediction.variance.sqrt()
    inside = (x_test > GAP[0]) & (x_test < GAP[1])
    print(f"mse {(prediction.mean - y_test)[~inside].square().mean():.4f} where there are data")
    for name, mask in (("where there are data", ~inside), ("in the gap", inside)):
        print(f"mean variance {prediction.variance[mask].mean():.4f} {name}")

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    low, high = ((prediction.mean + sign * 2 * spread).flatten() for sign in (-1, 1))
    axes.fill_between(
        x_test.flatten(), low, high, alpha=0.25, label="two standard deviations over modes"
    )
    axes.plot(x_test, prediction.mean, label="ensemble")
    axes.plot(x_test, y_test, "k--", linewidth=1, label="sin 2πx")
    axes.plot(
        *(torch.cat(part) for part in zip(*clients, strict=True)),
        "k.",
        markersize=3,
        label="clients' data",
    )
    axes.set(xlabel="x", ylabel="y", ylim=(-2.5, 2.5))
    axes.legend(loc="lower left", fontsize="small")
    figure.savefig(file)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/regression_uncertainty.py FIGURE.png")
    main(Path(sys.argv[1]))
