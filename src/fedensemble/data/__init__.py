"""Datasets, partitions of a dataset among clients, and the resulting `FederatedData`."""

# These modules are imported because they register datasets and partitions. They import optional
# libraries (scikit-learn, Pillow, pooch) only when a dataset needs them.
from . import schema  # noqa: F401
from .client_rows import ClientRows
from .dataset import Dataset, data_folder, datasets, load
from .federated import FederatedData
from .folders.encode_text import hash_words
from .folders.image_files import read_images
from .huggingface.read import read_huggingface
from .normalize import Standardise
from .partitioning import class_partition, dirichlet  # noqa: F401
from .partitioning.partition import partition, partitions
from .sources import (  # noqa: F401
    cifar,
    digits,
    fake,
    images,
    mnist,
    npz,
    openimage,
    rotated,
    shakespeare,
    synthetic,
    table,
    text,
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
    "hash_words",
    "load",
    "partition",
    "partitions",
    "read_huggingface",
    "read_images",
    "sources",
]
