"""Unlabelled inputs for the server: held out from the training examples, or read from a file."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from ...arguments import require_fraction
from ...errors import DataError, InputError, setting
from ..checks import describe_example
from ..convert import as_inputs, as_tensor
from ..dataset import Dataset, make_rng
from ..sources.npz import find_npz, read_arrays


def hold_out_server_inputs(source: Dataset, share: float, seed: int) -> Dataset:
    """Returns the dataset with a random `share` of its training inputs moved to the server.

    The targets of these inputs are dropped.

    >>> from fedensemble.data import load
    >>> held_out = hold_out_server_inputs(load("gaussians", n=100), 0.2, seed=0)
    >>> len(held_out.x), len(held_out.x_server)
    (80, 20)
    """
    count = round(require_fraction("data", "server_share", share) * len(source))
    if not 0 < count < len(source):
        raise InputError(
            f"{setting('data.server_share')} = {share} of {len(source)} training examples leaves "
            "none for the server or the clients."
        )
    mask = np.zeros(len(source), bool)
    mask[make_rng(seed, "server").permutation(len(source))[:count]] = True
    x, y = as_tensor(source.x), as_tensor(source.y)
    return replace(
        source,
        x=x[~mask],
        y=y[~mask],
        group=None if source.group is None else source.group[~mask],
        x_server=x[mask],
        info={**source.info, "server_share": share},
    )


def load_server_inputs(source: Dataset, path: Path) -> Dataset:
    """Returns the dataset with the array x of an .npz file as the inputs of the server.

    Raises:
        DataError: the inputs of the file have another shape or type than those of the dataset.
    """
    file = find_npz(path, None)
    x, train_x = as_inputs(read_arrays(file, {"x": "x"})["x"]), as_inputs(source.x)
    if x.shape[1:] != train_x.shape[1:] or x.is_floating_point() != train_x.is_floating_point():
        raise DataError(
            f"Inputs in {file} are {describe_example(x)} per example, those of {source.name} "
            f"{describe_example(train_x)}."
        )
    return replace(source, x_server=x, info={**source.info, "server_file": str(file)})
