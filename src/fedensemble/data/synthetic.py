"""Synthetic datasets: the sine toy of the paper, and Gaussian classes for tests and for measuring
scale.
"""

import numpy as np
from numpy.typing import NDArray

from ..arguments import need_memory, not_negative, positive, whole
from .dataset import Source, generator, sources


@sources.register("sine")
def sine(
    *, clients: int = 50, points: int = 2, noise: float = 0.2, spread: float = 0.2, seed: int = 0
) -> Source:
    """The paper's toy: client i has `points` pairs with y = a_i sin(2 pi x) + N(0, noise^2), a_i ~
    N(1, spread^2).

    x is uniform on [-1, 1]. Inputs and targets are float32 [n, 1]; the natural clients are the a_i.
    The test set is a grid of 201 points of the noiseless sin(2 pi x).

    Args:
        clients, points: number of clients, and of pairs each of them has.
        noise, spread: standard deviation of the targets' noise, and of the clients' amplitudes.

    >>> sine(clients=3, points=2).group.tolist()
    [0, 0, 1, 1, 2, 2]
    """
    clients = whole("dataset 'sine'", "clients", clients, minimum=1)
    points = whole("dataset 'sine'", "points", points, minimum=1)
    noise = not_negative("dataset 'sine'", "noise", noise)
    spread = not_negative("dataset 'sine'", "spread", spread)
    need_memory(
        "dataset 'sine'", 8 * 4 * clients * points, f"clients={clients} and points={points}"
    )
    random = generator(seed, "sine")
    amplitude = random.normal(1.0, spread, clients)
    x = random.uniform(-1.0, 1.0, (clients, points))
    y = amplitude[:, None] * np.sin(2 * np.pi * x) + random.normal(0.0, noise, x.shape)
    x_test = np.linspace(-1.0, 1.0, 201)
    info = {"source": "sine", "files": [], "clients": clients, "points": points, "seed": seed}
    return Source(
        column(x),
        column(y),
        column(x_test),
        column(np.sin(2 * np.pi * x_test)),
        group=np.repeat(np.arange(clients), points),
        info=info,
    )


@sources.register("gaussians")
def gaussians(
    *,
    n: int = 1000,
    classes: int = 4,
    features: int = 8,
    separation: float = 4.0,
    n_test: int = 500,
    seed: int = 0,
) -> Source:
    """Classes that are unit Gaussians: x float32 [n, features], y int64 [n], as many of each class
    as can be.

    Args:
        n, n_test: number of training and of test examples; no test set if `n_test` is 0.
        classes, features: number of classes, and of numbers an example has.
        separation: typical distance of two class means, in standard deviations of a class.
    """
    owner = "dataset 'gaussians'"
    classes = whole(owner, "classes", classes, minimum=2)
    n, n_test = whole(owner, "n", n, minimum=1), whole(owner, "n_test", n_test)
    features = whole(owner, "features", features, minimum=1)
    size = 8 * (2 * (n + n_test) * (features + 1) + classes * features)
    need_memory(owner, size, f"n={n}, n_test={n_test}, classes={classes} and features={features}")
    random = generator(seed, "gaussians")
    # The squared distance of two such means is separation^2 in expectation.
    means = random.normal(
        0.0, positive(owner, "separation", separation) / np.sqrt(2 * features), (classes, features)
    )
    y = random.permutation(np.arange(n) % classes)
    y_test = random.permutation(np.arange(n_test) % classes)
    x = (means[y] + random.normal(size=(n, features))).astype(np.float32)
    x_test = (means[y_test] + random.normal(size=(n_test, features))).astype(np.float32)
    info = {"source": "gaussians", "files": [], "seed": seed}
    if n_test == 0:
        return Source(x, y, classes=classes, info=info)
    return Source(x, y, x_test, y_test, classes=classes, info=info)


def column(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """The values as float32 [n, 1]."""
    return values.reshape(-1, 1).astype(np.float32)
