"""Methods keep their contract with settings that take other ways through the code than the defaults
do.
"""

import pytest

from fedensemble import (
    QSGD,
    Diana,
    Dore,
    FedAc,
    FedAvgM,
    FedDyn,
    FedPD,
    FedProx,
    FedSplit,
    Scaffold,
)
from fedensemble.algorithms import IFCA
from fedensemble.testing import check_algorithm

ALGORITHMS = [
    FedAvgM(lr=0.3, beta=0.5, lr_decay=0.5, lr_decay_every=2),
    FedAc(lr=0.1, coupling="II"),
    FedPD(p=0.5),
    FedPD(average="all"),
    FedSplit(average="all", weighting="examples"),
    FedProx(stragglers=0.5),
    Scaffold(weighting="examples", server_lr=0.5),
    FedDyn(weighting="examples"),
    Diana(compressor="rand-k", share=0.3, beta=0.5),
    Dore(compressor="dither", norm="2", block=7),
    QSGD(compressor="top-k"),
    IFCA(start="clusters", probe_every=2),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: type(a).__name__)
def test_contract(algorithm):
    check_algorithm(algorithm, "vector")
