"""Keyed random layers: reproducible, correctly distributed, and the same inside vmap."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedensemble import InputError, prng
from fedensemble.modeling.keyed_rng import KeyedRandomness

KEY = prng.key(0, "test")
MANY = 100_000
SIX_SIGMA = 6 / MANY**0.5  # of the mean of MANY values with variance one


def keyed(function, at=KEY):
    with KeyedRandomness(at):
        return function()


@pytest.mark.parametrize(
    "function",
    [
        lambda: F.alpha_dropout(torch.ones(4), 0.5, training=True),
        lambda: F.feature_alpha_dropout(torch.ones(4, 4), 0.5, training=True),
        lambda: F.rrelu(-torch.ones(4), training=True),
        lambda: F.gumbel_softmax(torch.ones(4)),
        lambda: torch.multinomial(torch.ones(4), 2),
        lambda: torch.ones(4).multinomial(2),
        lambda: torch.poisson(torch.ones(4)),
        lambda: torch.normal(torch.zeros(4), 1.0),
        lambda: torch.randint(3, (4,)),
        lambda: torch.randperm(4),
        lambda: torch.randint_like(torch.ones(4), 3),
        lambda: torch.empty(4).normal_(),
        lambda: torch.empty(4).uniform_(),
        lambda: torch.empty(4).bernoulli_(0.5),
        lambda: torch.empty(4).exponential_(),
        lambda: torch.distributions.Normal(0.0, 1.0).sample((4,)),
        lambda: nn.FractionalMaxPool2d(2, output_size=2)(torch.ones(1, 1, 4, 4)),
        lambda: nn.AlphaDropout()(torch.ones(4)),
        lambda: F.multi_head_attention_forward(
            *[torch.ones(3, 1, 4)] * 3,
            4,
            2,
            torch.ones(12, 4),
            None,
            None,
            None,
            False,
            0.0,
            torch.ones(4, 4),
            None,
            static_k=torch.ones(2, 3, 2),
        ),
        lambda: F.dropout(torch.ones(4), 1.5),
    ],
)
def test_functions_without_a_keyed_replacement_are_rejected(function):
    with pytest.raises(InputError):
        keyed(function)


ATTENTION = nn.MultiheadAttention(4, 2, dropout=0.4)
DRAWING = [
    lambda: F.dropout(torch.ones(64), 0.5),
    lambda: nn.Dropout(0.5)(torch.ones(64)),
    lambda: nn.Dropout(0.5, inplace=True)(torch.ones(64)),
    lambda: nn.Dropout1d(0.5)(torch.ones(8, 8, 2)),
    lambda: nn.Dropout2d(0.5)(torch.ones(8, 8, 2, 2)),
    lambda: nn.Dropout3d(0.5)(torch.ones(8, 8, 2, 2, 2)),
    lambda: torch.dropout(torch.ones(64), 0.5, True),
    lambda: torch.feature_dropout(torch.ones(8, 8, 2), 0.5, True),
    lambda: torch.rand_like(torch.ones(64)),
    lambda: torch.randn_like(torch.ones(64)),
    lambda: torch.rand(8, 8),
    lambda: torch.rand((8, 8)),
    lambda: torch.randn(64),
    lambda: torch.bernoulli(torch.full((64,), 0.5)),
    lambda: torch.full((64,), 0.5).bernoulli(),
    lambda: torch.ones(64).bernoulli(0.5),
    lambda: F.scaled_dot_product_attention(*[torch.rand(2, 9, 4)] * 3, dropout_p=0.4),
    lambda: F.scaled_dot_product_attention(*[torch.rand(2, 9, 4)] * 3, None, 0.4),
    lambda: ATTENTION(*[torch.ones(9, 1, 4)] * 3)[1],
]


@pytest.mark.parametrize("function", DRAWING)
def test_the_key_determines_the_values_and_torchs_generator_is_not_used(function):
    before = torch.get_rng_state()
    first, again, other = keyed(function), keyed(function), keyed(function, prng.fold_in(KEY, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_calls_of_one_pass_differ():
    first, second = keyed(lambda: (F.dropout(torch.ones(64)), F.dropout(torch.ones(64))))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_mean_and_values(p):
    dropped = keyed(lambda: F.dropout(torch.ones(MANY, dtype=torch.float64), p))
    assert set(dropped.unique().tolist()) == {0.0, 1 / (1 - p)}
    spread = (p / (1 - p)) ** 0.5
    assert abs(float(dropped.mean()) - 1) < spread * SIX_SIGMA


def test_dropout_of_nothing_and_everything():
    x = torch.randn(8)
    assert torch.equal(keyed(lambda: F.dropout(x, 0.0)), x)
    assert torch.equal(keyed(lambda: F.dropout(x, 0.5, training=False)), x)
    assert torch.equal(keyed(lambda: F.dropout(x, 1.0)).abs(), torch.zeros(8))


@pytest.mark.parametrize("layer", [nn.Dropout1d, nn.Dropout2d, nn.Dropout3d])
def test_entire_channels_are_dropped(layer):
    spatial = {nn.Dropout1d: (5,), nn.Dropout2d: (5, 4), nn.Dropout3d: (5, 4, 3)}[layer]
    dropped = keyed(lambda: layer(0.5)(torch.ones(16, 16, *spatial))).reshape(16, 16, -1)
    assert bool((dropped == dropped[..., :1]).all())
    assert set(dropped.unique().tolist()) == {0.0, 2.0}


def test_moments():
    uniform = keyed(lambda: torch.rand(MANY, dtype=torch.float64))
    normal = keyed(lambda: torch.randn(MANY, dtype=torch.float64))
    bernoulli = keyed(lambda: torch.bernoulli(torch.full((MANY,), 0.3, dtype=torch.float64)))
    assert abs(float(uniform.mean()) - 0.5) < SIX_SIGMA
    assert abs(float(normal.mean())) < SIX_SIGMA
    assert abs(float(normal.var()) - 1) < 2 * SIX_SIGMA
    assert abs(float(bernoulli.mean()) - 0.3) < SIX_SIGMA


@pytest.mark.parametrize(
    "layer",
    [
        nn.Dropout(0.5),
        nn.Dropout2d(0.5),
        lambda x: x + torch.randn_like(x),
        lambda x: x * torch.rand(3, 4, 5, 5),
    ],
)
def test_vmap_agrees_with_one_at_a_time(layer):
    keys, x = prng.key(0, "visits", torch.arange(6)), torch.ones(6, 3, 4, 5, 5)

    def run(key, x):
        with KeyedRandomness(key):
            return layer(x)

    together = torch.func.vmap(run, randomness="error")(keys, x)
    alone = torch.stack([run(keys[j], x[j]) for j in range(6)])
    assert torch.equal(together, alone)
    assert not torch.equal(together[0], together[1])
