"""What robust aggregators promise for any uploads: order does not count, and a minority moves
nothing far.
"""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedensemble.robust import (
    CenteredClipping,
    GeometricMedian,
    Krum,
    Mean,
    Median,
    MultiKrum,
    TrimmedMean,
    attacks,
)
from fedensemble.robust.krum import krum_scores
from fedensemble.robust.options import tolerated

RULES = [
    Median(),
    TrimmedMean(),
    Krum(),
    MultiKrum(),
    GeometricMedian(iterations=100),
    CenteredClipping(),
]
NAMES = [type(rule).__name__ for rule in RULES]


@st.composite
def crowds(draw, smallest=1, most_malicious=0.5):
    """Changes of honest clients [n - f, P], and of f malicious ones, a minority that may send
    anything.
    """
    n = draw(st.integers(smallest, 11))
    f = draw(st.integers(0, min((n - 1) // 2, int(most_malicious * n))))
    size = draw(st.integers(1, 4))
    seed = draw(st.integers(0, 2**32))
    honest = torch.randn(
        n - f, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    lies = st.lists(
        st.lists(st.sampled_from([0.0, 1.0, -5.0, 1e3, -1e6, 1e12]), min_size=size, max_size=size),
        min_size=f,
        max_size=f,
    )
    return honest, torch.tensor(draw(lies), dtype=torch.float64).reshape(f, size)


def combined(rule, x):
    return rule.combine({"theta": x}, torch.ones(len(x), dtype=x.dtype))["theta"]


@pytest.mark.parametrize("rule", [*RULES, Mean()], ids=[*NAMES, "Mean"])
@settings(deadline=None, max_examples=60)
@given(crowd=crowds(), data=st.data())
def test_the_order_of_clients_does_not_count(rule, crowd, data):
    x = torch.cat(crowd)
    order = data.draw(st.permutations(range(len(x))))
    # of clients with equal scores the first counts: engines hand them over in one order
    if isinstance(rule, Krum):
        scores = krum_scores({"theta": x}, tolerated(rule.malicious, len(x))).sort().values
        assume(bool((scores.diff() > 1e-9 * scores[1:]).all()))
    expected, found = combined(rule, x), combined(rule, x[list(order)])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9 * float(1 + x.abs().max()))


@settings(deadline=None, max_examples=60)
@given(crowds())
def test_the_median_stays_among_the_honest(crowd):
    honest, lies = crowd
    found = combined(Median(), torch.cat([lies, honest]))
    assert bool((found >= honest.min(0).values).all()) and bool(
        (found <= honest.max(0).values).all()
    )


@settings(deadline=None, max_examples=60)
@given(crowds(most_malicious=0.2))
def test_the_trimmed_mean_stays_among_the_honest(crowd):
    honest, lies = crowd
    found = combined(TrimmedMean(trim=0.2), torch.cat([honest, lies]))
    slack = 1e-12 * (1 + honest.abs().max())
    assert bool((found >= honest.min(0).values - slack).all()) and bool(
        (found <= honest.max(0).values + slack).all()
    )


@settings(deadline=None, max_examples=60)
@given(crowds(smallest=3, most_malicious=0.2))
def test_krum_stays_within_the_honest_clients_reach(crowd):
    """Its choice has n - f - 1 neighbors that are no further than an honest client's, so an honest
    one is near.
    """
    honest, lies = crowd
    found = combined(Krum(malicious=0.2), torch.cat([honest, lies]))
    diameter = torch.cdist(honest, honest).max()
    nearest = torch.linalg.vector_norm(honest - found, dim=1).min()
    assert nearest <= (len(honest) + len(lies)) ** 0.5 * diameter + 1e-9


@settings(deadline=None, max_examples=60)
@given(crowds(smallest=3))
def test_the_geometric_median_is_bounded_by_the_honest(crowd):
    """Lopuhaa and Rousseeuw 1991: at most 2 (n - f) / (n - 2 f) times as far out as the furthest
    honest client.
    """
    honest, lies = crowd
    n, f = len(honest) + len(lies), len(lies)
    found = combined(GeometricMedian(iterations=1000), torch.cat([honest, lies]))
    bound = 2 * (n - f) / (n - 2 * f) * torch.linalg.vector_norm(honest, dim=1).max()
    assert torch.linalg.vector_norm(found) <= 1.01 * bound


@settings(deadline=None, max_examples=60)
@given(crowds(), st.floats(0.1, 10.0))
def test_centered_clipping_moves_no_further_than_its_radius(crowd, tau):
    x = torch.cat(crowd)
    assert torch.linalg.vector_norm(combined(CenteredClipping(tau=tau), x)) <= tau + 1e-9
    honest = torch.linalg.vector_norm(crowd[0], dim=1).max()
    assert torch.linalg.vector_norm(combined(CenteredClipping(), x)) <= honest + 1e-9


@settings(deadline=None, max_examples=60)
@given(st.floats(0, 0.49), st.integers(1, 200))
def test_the_tolerated_clients_are_the_share_rounded_up_and_a_minority(share, clients):
    f = tolerated(share, clients)
    assert 2 * f < clients and (f >= share * clients - 1e-6 or 2 * f + 2 >= clients)


@pytest.mark.parametrize("name", list(attacks))
@settings(deadline=None, max_examples=60)
@given(share=st.floats(0, 1), population=st.integers(1, 60), seed=st.integers(0, 100))
def test_the_malicious_clients_are_a_fixed_share(name, share, population, seed):
    attack = attacks[name](share=share)
    chosen = attack.malicious(population, seed)
    assert int(chosen.sum()) == round(share * population)
    assert torch.equal(chosen, attack.malicious(population, seed))
