"""Data: sources, how their rows are divided among clients, and the federated data that comes of
it.
"""

# These modules are imported for the names they register; none of them imports a heavy library
# before it is used.
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
