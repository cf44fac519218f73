"""Loads a client's examples. This is the one file to change."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedensemble.deploy import example_client, load_file


def load(node: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns the client's inputs [n, ...] and targets [n, ...]: arrays, tensors or lists.

    This function runs on the client's own machine.

    Args:
        node: the `--node-config` of that machine's SuperNode, such as 'data="/srv/mine.csv"'.
    """
    app = Path(__file__).parent
    if "data" in node:  # an .npz file with arrays x and y, or a .csv file with column names
        return load_file(app, node["data"])
    # Without a file, return client `partition-id` of the dataset in example.toml, to try the app.
    return example_client(app, node)
