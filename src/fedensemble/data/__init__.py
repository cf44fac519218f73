"""Datasets, partitions of a dataset among clients, and the resulting `FederatedData`."""

# These modules are imported because they register datasets and partitions. They import optional
# libraries (scikit-learn, Pillow, pooch) only when a dataset needs them.
from . import cifar, digits, fake, label_partition, mnist, npz, openimage, shakespeare, synthetic  # noqa: F401
from .dataset import Source, data_folder, load, sources
from .download import get
from .federated import FederatedData
from .normalize import Standardise
from .partition import partition, partitions

__all__ = [
    "FederatedData",
    "Source",
    "Standardise",
    "data_folder",
    "get",
    "load",
    "partition",
    "partitions",
    "sources",
]
