"""Synthetic datasets: the sine regression of the paper, and Gaussian classes for tests."""

import numpy as np
from numpy.typing import NDArray

from ...arguments import need_memory, require_integer, require_nonnegative, require_positive
from ...errors import InputError
from ..dataset import Dataset, datasets, make_rng


@datasets.register("sine")
def sine(
    *, clients: int = 50, points: int = 2, noise: float = 0.2, spread: float = 0.2, seed: int = 0
) -> Dataset:
    """The paper's toy regression: noisy points of a sine with a random amplitude per client.

    Client i has `points` pairs (x, y) with x uniform on [-1, 1], y = a_i sin(2 pi x) + N(0,
    noise^2) and a_i ~ N(1, spread^2). Inputs and targets are float32 [n, 1]. The natural clients
    are those of the a_i. The test set is a grid of 201 points of the noiseless sin(2 pi x).

    Args:
        clients: number of clients.
        points: number of pairs per client.
        noise: standard deviation of the noise of the targets.
        spread: standard deviation of the amplitudes of the clients.

    >>> sine(clients=3, points=2).group.tolist()
    [0, 0, 1, 1, 2, 2]
    """
    clients = require_integer("dataset 'sine'", "clients", clients, minimum=1)
    points = require_integer("dataset 'sine'", "points", points, minimum=1)
    noise = require_nonnegative("dataset 'sine'", "noise", noise)
    spread = require_nonnegative("dataset 'sine'", "spread", spread)
    need_memory(
        "dataset 'sine'", 8 * 4 * clients * points, f"clients={clients} and points={points}"
    )
    rng = make_rng(seed, "sine")
    amplitude = rng.normal(1.0, spread, clients)
    x = rng.uniform(-1.0, 1.0, (clients, points))
    y = amplitude[:, None] * np.sin(2 * np.pi * x) + rng.normal(0.0, noise, x.shape)
    x_test = np.linspace(-1.0, 1.0, 201)
    info = {"source": "sine", "files": [], "clients": clients, "points": points, "seed": seed}
    return Dataset(
        as_column(x),
        as_column(y),
        as_column(x_test),
        as_column(np.sin(2 * np.pi * x_test)),
        group=np.repeat(np.arange(clients), points),
        info=info,
    )


@datasets.register("gaussians")
def gaussians(
    *,
    n: int = 1000,
    classes: int = 4,
    features: int = 8,
    separation: float = 4.0,
    n_test: int = 500,
    seed: int = 0,
) -> Dataset:
    """Balanced classes of unit Gaussians: x float32 [n, features], y int64 [n].

    Args:
        n: number of training examples.
        classes: number of classes.
        features: number of features per example.
        separation: typical distance of two class means, in standard deviations of a class.
        n_test: number of test examples; 0 means no test set.
    """
    owner = "dataset 'gaussians'"
    classes = require_integer(owner, "classes", classes, minimum=2)
    n, n_test = require_integer(owner, "n", n, minimum=1), require_integer(owner, "n_test", n_test)
    features = require_integer(owner, "features", features, minimum=1)
    size = 8 * (2 * (n + n_test) * (features + 1) + classes * features)
    need_memory(owner, size, f"n={n}, n_test={n_test}, classes={classes} and features={features}")
    rng = make_rng(seed, "gaussians")
    # The expected squared distance of two such means is separation^2.
    means = rng.normal(
        0.0,
        require_positive(owner, "separation", separation) / np.sqrt(2 * features),
        (classes, features),
    )
    y = rng.permutation(np.arange(n) % classes)
    y_test = rng.permutation(np.arange(n_test) % classes)
    x = (means[y] + rng.normal(size=(n, features))).astype(np.float32)
    x_test = (means[y_test] + rng.normal(size=(n_test, features))).astype(np.float32)
    info = {"source": "gaussians", "files": [], "seed": seed}
    if n_test == 0:
        return Dataset(x, y, classes=classes, info=info)
    return Dataset(x, y, x_test, y_test, classes=classes, info=info)


@datasets.register("circle")
def circle(
    *,
    clients: int = 50,
    points: int = 2,
    noise: float = 0.1,
    covered: float = 0.7,
    conflict: float = 0.0,
    test: str = "grid",
    seed: int = 0,
) -> Dataset:
    """A regression on the unit circle, on which the paper's theorems can be checked.

    Inputs are (cos a, sin a), float32 [n, 2], of norm 1, as the theorems assume. The angles are
    evenly spaced over a part of the circle around a = 0, each moved at random by up to a quarter of
    the spacing, so that the kernel is well conditioned and the rest of the circle stays open.
    Targets are sin(2 a) + cos(a) / 2 + N(0, noise^2), [n, 1]. The natural clients
    hold `points` neighbours on the circle each.

    Args:
        clients: number of clients.
        points: number of examples per client.
        noise: standard deviation of the noise of the targets.
        covered: part of the circle that has examples.
        conflict: above 0, every odd client holds the inputs of the client before it, and the
            targets of the two differ by `conflict`. No model can then fit all clients: the
            theorems' assumption (iii) is broken.
        test: the test set: "grid", 120 noiseless points, or "train", the clients' examples, so that
            tests during training measure the training error.

    >>> circle(clients=3, points=2).group.tolist()
    [0, 0, 1, 1, 2, 2]
    """
    owner = "dataset 'circle'"
    clients = require_integer(owner, "clients", clients, minimum=1)
    points = require_integer(owner, "points", points, minimum=1)
    noise = require_nonnegative(owner, "noise", noise)
    conflict = require_nonnegative(owner, "conflict", conflict)
    covered = require_positive(owner, "covered", covered)
    if covered > 1:
        raise InputError(f"{owner} needs covered <= 1; got {covered}.")
    if test not in ("grid", "train"):
        raise InputError(f"{owner} needs test 'grid' or 'train'; got {test!r}.")
    need_memory(owner, 8 * 4 * clients * points, f"clients={clients} and points={points}")
    rng = make_rng(seed, "circle")
    owners = np.arange(clients)
    # With a conflict, clients 2 i and 2 i + 1 hold the examples of place i.
    place = owners // 2 if conflict > 0 else owners
    total = points * (int(place[-1]) + 1)
    along = (np.arange(total) + 0.5 + rng.uniform(-0.25, 0.25, total)) / total - 0.5
    angle = 2 * np.pi * covered * along
    y = _circle_target(angle) + rng.normal(0.0, noise, total)
    rows = (place[:, None] * points + np.arange(points)).ravel()
    shift = np.where(owners % 2 == 0, 0.5, -0.5).repeat(points) * conflict
    x, targets = _on_circle(angle[rows]), as_column(y[rows] + shift)
    grid = 2 * np.pi * (np.arange(120) / 120 - 0.5)
    x_test, y_test = _on_circle(grid), as_column(_circle_target(grid))
    if test == "train":
        x_test, y_test = x, targets
    info = {"source": "circle", "files": [], "clients": clients, "points": points, "seed": seed}
    return Dataset(x, targets, x_test, y_test, group=owners.repeat(points), info=info)


def _circle_target(angle: NDArray[np.float64]) -> NDArray[np.float64]:
    result: NDArray[np.float64] = np.sin(2 * angle) + np.cos(angle) / 2
    return result


def _on_circle(angle: NDArray[np.float64]) -> NDArray[np.float32]:
    """Returns the points of the unit circle at these angles, float32 [n, 2]."""
    return np.stack([np.cos(angle), np.sin(angle)], 1).astype(np.float32)


def as_column(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Returns the values as float32 [n, 1]."""
    return values.reshape(-1, 1).astype(np.float32)
