"""Federated algorithms, one file each; importing this package registers them."""

from .anchored import Anchored
from .diana import Diana
from .ditto import Ditto
from .dore import Dore
from .fedac import FedAc
from .fedavg import FedAvg
from .fedavgm import FedAvgM
from .fedbe import FedBE, FedBENoKD
from .fedcross import FedCross
from .feddyn import FedDyn
from .fedem import FedEM
from .fedma import FedMA
from .fednova import FedNova
from .fedopt import FedAdagrad, FedAdam, FedYogi
from .fedpd import FedPD
from .fedprox import FedProx
from .fedsdd import FedSDD
from .fedsplit import FedSplit
from .ifca import IFCA
from .local import Local
from .pfnm import PFNM
from .qsgd import QSGD
from .scaffold import Scaffold
from .svgd import SVGD

__all__ = [
    "IFCA",
    "PFNM",
    "QSGD",
    "SVGD",
    "Anchored",
    "Diana",
    "Ditto",
    "Dore",
    "FedAc",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedBE",
    "FedBENoKD",
    "FedCross",
    "FedDyn",
    "FedEM",
    "FedMA",
    "FedNova",
    "FedPD",
    "FedProx",
    "FedSDD",
    "FedSplit",
    "FedYogi",
    "Local",
    "Scaffold",
]
