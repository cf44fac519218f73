"""Data: sources, how their rows are divided among clients, and the federated data that comes of it."""

# These modules are imported for the names they register; none of them imports a heavy library before it is used.
from . import (  # noqa: F401
    cifar,
    digits,
    label_partition,
    mnist,
    npz,
    openimage,
    shakespeare,
    stand_in,
    synthetic,
)
from .download import get
from .federated import FederatedData
from .partition import partition, partitions
from .source import Source, data_folder, load, sources
from .standardise import Standardise

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
