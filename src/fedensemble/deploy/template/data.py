"""Loads a client's examples. This is the one file to change."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedensemble.deploy import example_client


def load(node: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns the client's inputs [n, ...] and targets [n, ...]: arrays, tensors or lists.

    This function runs on the client's own machine.

    Args:
        node: the `--node-config` of that machine's SuperNode, such as 'data="/srv/mine.npz"'.
    """
    if "data" in node:
        with np.load(Path(str(node["data"])), allow_pickle=False) as file:
            return file["x"], file["y"]
    # Without a file, return client `partition-id` of the dataset in config.toml, to try the app.
    return example_client(Path(__file__).parent, node)
