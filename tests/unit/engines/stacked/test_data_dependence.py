"""A model whose forward pass decides by its data is refused by `vector`, whatever the first
examples are.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedensemble import FedAvg, FederatedData, Federation, InputError
from fedensemble.testing.assertions import require_close
from fedensemble.testing.toy_problems import CLASSES, FEATURES, classification


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
    "in": lambda x: 1e9 in x,
    "slice": lambda x: len(x[0, : (x > 1e9).sum()]) > 0,  # as a batch is cut to its longest text
    "row": lambda x: x[x[:, 0].argmax()].shape[0] == 0,
    "range": lambda x: len(torch.arange((x > 1e9).sum())) > 0,
    "split": lambda x: len(x.tensor_split((x > 1e9).sum().reshape(1))[0]) > 0,
    "pointer": lambda x: torch.from_dlpack(x.detach()).max() > 1e9,
    "picked": lambda x: len(x[x > 1e9]) > 0,
    "size of picked": lambda x: x.masked_select(x > 1e9).exp().shape[0] > 0,
    "number of picked": lambda x: x[x > 1e9].numel() > 0,
    "places": lambda x: len((x > 1e9).nonzero()) > 0,
    "different": lambda x: len((x > 1e9).unique()) > 1,
}


@pytest.mark.parametrize("decision", DECISIONS)
def test_decisions_are_refused(decision):
    with pytest.raises(InputError, match="engine 'loop'"):
        Federation(
            lambda: Deciding(DECISIONS[decision]), classification(), FedAvg(), engine="vector"
        )
    looped = Federation(
        lambda: Deciding(DECISIONS[decision]), classification(), FedAvg(), engine="loop"
    )
    assert next(looped.rounds(1)).losses.isfinite().all()


def test_shapes_may_be_looked_at():
    def by_shape(x):
        return x.shape[0] > 0 and len(x) > 0 and x.dim() == 2 and x.size(1) == FEATURES

    made = Federation(
        lambda: Deciding(by_shape), classification(), FedAvg(), engine="vector", dtype=torch.float64
    )
    assert made.engine.stacked


class Between(nn.Module):
    def __init__(self, between):
        super().__init__()
        self.first, self.last, self.between = (
            nn.Linear(FEATURES, FEATURES),
            nn.Linear(FEATURES, CLASSES),
            between,
        )
        self.register_buffer("some", torch.arange(FEATURES) % 2 == 0)
        self.register_buffer("few", torch.tensor(FEATURES - 1))

    def forward(self, x):
        return self.last(self.between(self, self.first(x)))


def layer_on_some(net, x):
    rare = x[:, 0] > 1e9  # rows of all clients, and none on a trial
    return x.index_put((rare,), net.first(x[rare]))


def roots_of_some(net, x):
    out, picked = torch.zeros_like(x), x > 0
    out[picked] = (x[picked] + 1).sqrt()
    return out


def printed(net, x):
    print(x, f"{x.mean():.3f}")
    return x


def by_constants(net, x):
    outer = (x.unsqueeze(2) * x.unsqueeze(1))[:, torch.ones(FEATURES, FEATURES).tril().bool()]
    return torch.cat([outer[:, : net.few], x[:, net.some][:, :1]], 1)


MIXED = {
    "a layer on some rows": layer_on_some,
    "a sum of some": lambda net, x: x + x[x > 1e9].sum(),
}
HARMLESS = {
    "numbers put back": roots_of_some,
    "scattered back": lambda net, x: x.masked_scatter(x > 0, x.masked_select(x > 0).log1p()),
    "one-hot": lambda net, x: x * F.one_hot(x.argmax(1), FEATURES),
    "printed": printed,
    "constants": by_constants,
    "product": lambda net, x: x * x.prod(1, keepdim=True),  # whose slope asks torch for zeros
    "repeated": lambda net, x: x.repeat_interleave(torch.tensor([0, 2] + [1] * (FEATURES - 2)), 1),
}


def between(case, engine):
    return Federation(
        lambda: Between(case), classification(), FedAvg(), engine=engine, dtype=torch.float64
    )


@pytest.mark.parametrize("case", MIXED)
def test_what_is_picked_by_numbers_meets_no_other_clients(case):
    with pytest.raises(InputError, match=r"has data-dependent control flow.*engine 'loop'"):
        between(MIXED[case], "vector")


@pytest.mark.parametrize("case", HARMLESS)
def test_what_decides_nothing_is_folded(case):
    got, expected = (between(HARMLESS[case], engine) for engine in ("vector", "loop"))
    for made in (got, expected):
        list(made.rounds(2))
    assert got.engine.stacked
    require_close(got.state.modes, expected.state.modes, f"Engines disagree on {case}")


def looking(outputs, targets):
    return (outputs - targets) ** 2 * (
        2 if max(outputs.tolist())[0] > 1e9 or float(targets.max()) > 1e9 else 1
    )


def likely(outputs, targets):
    spread = 1 + outputs.abs()
    known = torch.distributions.Normal(outputs, spread).log_prob(targets)
    return F.gaussian_nll_loss(outputs, targets, spread, reduction="none") - known


def regression(loss, engine):
    data = FederatedData.from_clients([(torch.randn(6, 4), torch.rand(6, 2)) for _ in range(3)])
    return Federation(
        lambda: nn.Linear(4, 2), data, FedAvg(), engine=engine, loss=loss, batch_size=2
    )


def test_a_loss_may_not_decide_either():
    with pytest.raises(InputError, match="its loss has data-dependent control flow"):
        regression(looking, "vector")
    assert next(regression(looking, "loop").rounds(1)).losses.isfinite().all()


def by_size(outputs, targets):
    each = torch.func.vmap(lambda o, t: ((o - t) ** 2).sum() / len(o))(outputs, targets)
    return each.sum() / outputs.shape[0]


@pytest.mark.parametrize("loss", [likely, by_size])
def test_a_loss_that_checks_its_numbers_or_asks_for_sizes_is_folded(loss):
    assert regression(loss, "vector").engine.stacked
