"""Unlabelled inputs of the server's own: held back from the training examples, or read from a
file.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from ..arguments import fraction
from ..errors import DataError, InputError
from .checks import describe
from .convert import as_inputs, as_tensor
from .dataset import Source, generator
from .npz import find_npz, read_arrays


def with_server_share(source: Source, share: float, seed: int) -> Source:
    """The source with this share of its training inputs, chosen at random, on the server; their
    targets are dropped.

    >>> from fedensemble.data import load
    >>> held = with_server_share(load("gaussians", n=100), 0.2, seed=0)
    >>> len(held.x), len(held.x_server)
    (80, 20)
    """
    count = round(fraction("data", "server_share", share) * len(source))
    if not 0 < count < len(source):
        raise InputError(
            f"data.server_share = {share} of {len(source)} training examples leaves none for the server or the clients."
        )
    held = np.zeros(len(source), bool)
    held[generator(seed, "server").permutation(len(source))[:count]] = True
    x, y = as_tensor(source.x), as_tensor(source.y)
    group = None if source.group is None else source.group[~held]
    return replace(
        source,
        x=x[~held],
        y=y[~held],
        group=group,
        x_server=x[held],
        info={**source.info, "server_share": share},
    )


def with_server_file(source: Source, path: Path) -> Source:
    """The source with the array x of an .npz file as the server's inputs; they must look like its
    own.
    """
    file = find_npz(path, None)
    x, own = as_inputs(read_arrays(file, {"x": "x"})["x"]), as_inputs(source.x)
    if x.shape[1:] != own.shape[1:] or x.is_floating_point() != own.is_floating_point():
        raise DataError(
            f"Inputs in {file} are {describe(x)} an example, those of {source.name} {describe(own)}."
        )
    return replace(source, x_server=x, info={**source.info, "server_file": str(file)})
