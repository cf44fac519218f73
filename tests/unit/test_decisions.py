"""A model whose forward pass decides by its data is refused by `vector`, whatever the first examples are."""

import numpy as np
import pytest
import torch
from torch import nn

from fedensemble import FedAvg, Federation, InputError
from fedensemble.testing.problems import CLASSES, FEATURES, classification


class Deciding(nn.Module):
    def __init__(self, decide):
        super().__init__()
        self.layer, self.decide = nn.Linear(FEATURES, CLASSES), decide

    def forward(self, x):
        return self.layer(x) if self.decide(x) else -self.layer(x)


DECISIONS = {
    "if": lambda x: x.max() > 1e9,  # never true, on a trial or later
    "item": lambda x: x.max().item() > 1e9,
    "float": lambda x: float(x.max()) > 1e9,
    "int": lambda x: int(x.max()) > 1e9,
    "list": lambda x: max(x[0].tolist()) > 1e9,
    "numpy": lambda x: x.detach().numpy().max() > 1e9,
    "array": lambda x: np.asarray(x.detach()).max() > 1e9,
    "equal": lambda x: torch.equal(x, x + 1e9),
    "allclose": lambda x: torch.allclose(x, x + 1e9),
    "non-zero": lambda x: torch.is_nonzero(x.max() > 1e9),
    "methods": lambda x: x.equal(x + 1e9) or x.allclose(x + 1e9) or (x.max() > 1e9).is_nonzero(),
}


@pytest.mark.parametrize("decision", DECISIONS)
def test_decisions_are_refused(decision):
    with pytest.raises(InputError, match="engine 'loop'"):
        Federation(lambda: Deciding(DECISIONS[decision]), classification(), FedAvg(), engine="vector")
    looped = Federation(lambda: Deciding(DECISIONS[decision]), classification(), FedAvg(), engine="loop")
    assert next(looped.rounds(1)).losses.isfinite().all()


def test_shapes_may_be_looked_at():
    def by_shape(x):
        return x.shape[0] > 0 and len(x) > 0 and x.dim() == 2 and x.size(1) == FEATURES

    made = Federation(lambda: Deciding(by_shape), classification(), FedAvg(), engine="vector", dtype=torch.float64)
    assert made.engine.folded
