"""Federated algorithms, one file each; importing this package registers them."""

from .anchored import Anchored
from .compressed.diana import Diana
from .compressed.dore import Dore
from .compressed.qsgd import QSGD
from .distilled.fedbe import FedBE, FedBENoKD
from .distilled.fedsdd import FedSDD
from .fedac import FedAc
from .fedavg import FedAvg
from .fedavgm import FedAvgM
from .fedcross import FedCross
from .feddyn import FedDyn
from .fednova import FedNova
from .fedopt import FedAdagrad, FedAdam, FedYogi
from .fedpd import FedPD
from .fedprox import FedProx
from .fedsplit import FedSplit
from .matching.fedma import FedMA
from .matching.pfnm import PFNM
from .personal.ditto import Ditto
from .personal.fedem import FedEM
from .personal.ifca import IFCA
from .personal.local import Local
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
