"""Datasets, partitions of a dataset among clients, and the resulting `FederatedData`."""

# These modules are imported because they register datasets and partitions. They import optional
# libraries (scikit-learn, Pillow, pooch) only when a dataset needs them.
from . import (  # noqa: F401
    class_partition,
    dirichlet,
    schema,
)
from .client_rows import ClientRows
from .dataset import Dataset, data_folder, datasets, load
from .federated import FederatedData
from .normalize import Standardise
from .partition import partition, partitions
from .sources import (  # noqa: F401
    cifar,
    digits,
    fake,
    mnist,
    npz,
    openimage,
    shakespeare,
    synthetic,
    table,
)
from .sources.download import get

# Earlier names of `Dataset` and `datasets`.
Source, sources = Dataset, datasets

__all__ = [
    "ClientRows",
    "Dataset",
    "FederatedData",
    "Source",
    "Standardise",
    "data_folder",
    "datasets",
    "get",
    "load",
    "partition",
    "partitions",
    "sources",
]
