"""Where a client's examples come from: the one file to change."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedensemble.deploy import example_client


def load(node: Mapping[str, Any]) -> tuple[Any, Any]:
    """The client's inputs [n, ...] and targets [n, ...]: arrays, tensors or lists.

    It runs on the client's own machine. `node` is what that machine's SuperNode was started with,
    `--node-config 'data="/srv/mine.npz"'`.
    """
    if "data" in node:
        with np.load(Path(str(node["data"])), allow_pickle=False) as file:
            return file["x"], file["y"]
    # Without a file: client `partition-id` of the data set in config.toml, to try the app out.
    return example_client(Path(__file__).parent, node)
