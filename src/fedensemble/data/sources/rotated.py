"""Images that some clients see rotated: a dataset whose clients belong to known groups."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...arguments import require_integer, require_one_of
from ...errors import InputError
from ..convert import as_tensor
from ..dataset import Dataset, Rows, datasets, make_rng
from .fake import fake_images
from .mnist import fashion_mnist, mnist

_DEGREES = {1: (0,), 2: (0, 180), 4: (0, 90, 180, 270)}


@datasets.register("rotated")
def rotated(
    *,
    images: str = "mnist",
    rotations: int = 4,
    sites: int = 100,
    n: int = 1000,
    n_test: int = 200,
    root: Path | None = None,
    seed: int = 0,
) -> Dataset:
    """Square images of natural clients, each of which sees all its images rotated by one angle.

    The images are divided at random. Site i has the angle number i mod `rotations`, and the name
    "90 degrees/17", so that the group of each client is known.

    Args:
        images: "mnist", "fashion-mnist" or "stand-in-images".
        rotations: number of angles: 1, 2 (0 and 180 degrees) or 4.
        sites: number of natural clients.
        n, n_test: number of images, of "stand-in-images" only.
        root: data folder.
        seed: of the division.

    >>> data = rotated(images="stand-in-images", n=40, n_test=8, sites=4)
    >>> data.x.shape, data.group_names[1]
    ((40, 1, 28, 28), '90 degrees/1')
    """
    owner = "dataset 'rotated'"
    require_one_of(owner, "images", images, ("mnist", "fashion-mnist", "stand-in-images"))
    if rotations not in _DEGREES:
        raise InputError(f"Dataset 'rotated' needs rotations 1, 2 or 4; got {rotations}.")
    require_integer(owner, "sites", sites, minimum=1)
    if images == "stand-in-images":
        source = fake_images(channels=1, side=28, n=n, n_test=n_test, seed=seed)
    else:
        source = (mnist if images == "mnist" else fashion_mnist)(root=root)
    if sites > len(source):
        raise InputError(f"Dataset 'rotated' has {len(source)} images for {sites} sites.")
    rng = make_rng(seed, "dataset/rotated")
    angles = _DEGREES[rotations]
    group, test_group = (
        rng.permutation(np.arange(0 if y is None else len(y)) % sites)
        for y in (source.y, source.y_test)
    )
    has_test = source.x_test is not None
    return Dataset(
        _turn(source.x, group, angles),
        source.y,
        _turn(source.x_test, test_group, angles) if has_test else None,
        source.y_test,
        classes=source.classes,
        class_names=source.class_names,
        standardise=source.standardise,
        group=group,
        test_group=test_group if has_test else None,
        group_names=tuple(f"{angles[site % len(angles)]} degrees/{site}" for site in range(sites)),
        info={**source.info, "source": "rotated", "images": images},
    )


def _turn(x: object, group: Rows, angles: tuple[int, ...]) -> NDArray[np.uint8]:
    """Returns the images, each turned by the angle of its client."""
    turned: NDArray[np.uint8] = as_tensor(x).cpu().numpy().copy()
    for number, degrees in enumerate(angles):
        mine = group % len(angles) == number
        turned[mine] = np.rot90(turned[mine], degrees // 90, axes=(2, 3))
    return turned
