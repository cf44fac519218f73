"""The paper's toy: a sine, two noisy points a client, and a band that opens where no client has
been.

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
# of the slower way for this model, which is fast enough
warnings.simplefilter("ignore", fe.EngineWarning)
GAP = (0.2, 0.6)  # no client has a point here


def main(picture: Path) -> None:
    """Trains ten modes, prints how good and how sure they are, and draws them."""
    source = sources["sine"](clients=80, points=2, noise=0.1, seed=0)
    x, y, x_test, y_test = (
        torch.as_tensor(v) for v in (source.x, source.y, source.x_test, source.y_test)
    )
    # clients whose points lie outside the gap
    seen = ((x < GAP[0]) | (x > GAP[1])).reshape(-1, 2).all(1)
    clients = [
        pair
        for pair, keep in zip(zip(x.split(2), y.split(2), strict=True), seen, strict=True)
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
    for name, chosen in (("where there are data", ~inside), ("in the gap", inside)):
        print(f"mean variance {prediction.variance[chosen].mean():.4f} {name}")

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
    figure.savefig(picture)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/regression_uncertainty.py PICTURE.png")
    main(Path(sys.argv[1]))
