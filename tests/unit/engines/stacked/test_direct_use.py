"""Parameters outside of layers: such models are stacked, and equal to engine `loop`."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedensemble import EngineWarning, FedAvg, FederatedData, Federation, InputError
from fedensemble.engines.stacked.call_log import leaves, map_leaves
from fedensemble.engines.stacked.errors import PATH_CHANGED
from fedensemble.engines.stacked.gradient import stacked_gradient
from fedensemble.modeling.functional_model import FunctionalModel
from fedensemble.testing.assertions import require_close

SIZES, CLASSES, WIDTH, LENGTH, TOKENS = (6, 4, 5, 7), 3, 4, 5, 7


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def numbers(*shape):
    y = torch.arange(sum(SIZES)) % CLASSES
    return FederatedData.from_arrays(randn(sum(SIZES), *shape), y, list(SIZES))


def tokens():
    x, y = (torch.arange(sum(SIZES) * LENGTH).reshape(-1, LENGTH) * n % TOKENS for n in (3, 5))
    return FederatedData.from_arrays(x, y, list(SIZES), classes=TOKENS)


def trained(model, data, engine, batch=3):
    federation = Federation(
        model,
        data,
        FedAvg(lr=0.1),
        modes=2,
        clients_per_round=4,
        batch_size=batch,
        engine=engine,
        dtype=torch.float64,
    )
    list(federation.rounds(2))
    return federation


def assert_stacked(model, data, batch=3):
    """The model is stacked, and trains as on `loop`; returns the number of direct calls."""
    vector, loop = (trained(model, data, engine, batch) for engine in ("vector", "loop"))
    assert vector.engine.stacked, vector.engine.notes
    require_close(vector.state.modes, loop.state.modes, "Engines disagree")
    require_close({"r": vector.state.buffers}, {"r": loop.state.buffers}, "Engines disagree")
    calls = vector.engine.direct_calls
    return 0 if calls is None else sum(call is not None for call in calls)


class Sequences(nn.Module):
    """A classifier of sequences [B, T, D], whose hidden part is `middle(self, x)`."""

    def __init__(self, middle):
        super().__init__()
        self.token = nn.Parameter(randn(1, 1, WIDTH))
        self.positions = nn.Parameter(randn(1, LENGTH + 1, WIDTH, seed=1))
        self.scale = nn.Parameter(randn(WIDTH, seed=2))
        self.matrix = nn.Parameter(randn(WIDTH, WIDTH, seed=3))
        self.low, self.high = (nn.Parameter(randn(*s)) for s in ((WIDTH, 2), (2, WIDTH)))
        self.table = nn.Embedding(LENGTH, WIDTH)
        self.parts = nn.ParameterList([nn.Parameter(randn(WIDTH, seed=n)) for n in (4, 5)])
        self.register_buffer("waves", randn(LENGTH, WIDTH, seed=6))
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.conv, self.prelu = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.PReLU()
        self.pairs = nn.Bilinear(WIDTH, WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.3, batch_first=True)
        self.first = nn.TransformerEncoderLayer(WIDTH, 2, 6, dropout=0.2)  # sequence first
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.dropout, self.out, self.middle = nn.Dropout(0.3), nn.Linear(WIDTH, CLASSES), middle

    def forward(self, x):
        return self.out(self.middle(self, x).mean(1))


def class_token(net, x):
    x = torch.cat([net.token.expand(len(x), -1, -1), x], dim=1)
    return x + net.positions[:, : x.shape[1]]


def written_in_place(net, x):
    x = net.linear(x)
    x += net.scale
    return x.mul_(net.matrix.diagonal())


def lora(net, x):
    return F.linear(x, net.linear.weight + (net.low @ net.high).T * 0.5, net.linear.bias)


def learned_start(net, x):
    return net.gru(x, net.token.expand(1, x.shape[0], -1).contiguous())[0]


def learned_queries(net, x):
    queries = net.positions.expand(x.size(0), LENGTH + 1, WIDTH)
    return net.attention(queries, x, x)[0]


def sequence_first(net, x):
    """Linear layers, norms, dropout and attention with the batch second."""
    x = net.norm(net.dropout(net.linear(x.transpose(0, 1))))
    return (net.first(x) * net.scale).transpose(0, 1)


MIDDLES = {
    "class token and positions": class_token,
    "layer scale": lambda net, x: x + net.scale * net.linear(x),
    "written in place": written_in_place,
    "matmul": lambda net, x: (x @ net.matrix) @ net.matrix.T,
    "einsum": lambda net, x: torch.einsum("btd,de->bte", x, net.matrix),
    "parameters only": lambda net, x: x + (net.matrix @ net.matrix).softmax(-1).sum(0).exp(),
    "LoRA": lora,
    "LoRA on activations": lambda net, x: net.linear(x) + x @ net.low @ net.high,
    "embedding of constants": lambda net, x: x + net.table(torch.arange(x.shape[1])),
    "indexing": lambda net, x: x * net.positions[0, 1, 2] + net.positions[:, [0, 2, 1, 3, 4]],
    "unbind and iteration": lambda net, x: x * sum(net.matrix.unbind(1)) + sum(net.matrix),
    "chunk and max": lambda net, x: x * net.matrix.chunk(2)[1].max(0).values,
    "a list of parameters": lambda net, x: x * torch.stack(list(net.parts)).sum(0),
    "a buffer": lambda net, x: net.dropout(x + net.waves[: x.shape[1]]),
    "shape of a parameter": lambda net, x: (
        x / net.matrix.shape[0] * len(net.scale) + net.matrix.dim() * x
    ),
    "norm of a parameter": lambda net, x: net.norm(net.positions)[:, :LENGTH] + x,
    "dropout of a parameter": lambda net, x: x * net.dropout(net.scale),
    "convolution of a parameter": lambda net, x: x + net.conv(net.positions.mT).mT[:, :LENGTH],
    "prelu of a parameter": lambda net, x: x + net.prelu(net.positions)[:, 1:],
    "bilinear": lambda net, x: net.pairs(x, x.flip(1)),
    "learned start of a GRU": learned_start,
    "learned queries": learned_queries,
    "attention to parameters": lambda net, x: F.scaled_dot_product_attention(
        x, *2 * [net.positions.expand(x.shape[0], -1, -1)]
    ),
    "queries that are parameters": lambda net, x: F.scaled_dot_product_attention(
        net.positions, x, x
    ),
    "sequence first": sequence_first,
    "dropout, sequence first": lambda net, x: (
        net.dropout(x.transpose(0, 1)).transpose(0, 1) * net.scale
    ),
    "where": lambda net, x: torch.where(x > 0, x, net.scale * x),
    "addcmul by name": lambda net, x: torch.addcmul(x, tensor1=net.scale, tensor2=x, value=0.5),
    "outer": lambda net, x: x[..., None].mul(net.scale).sum(-1),
}


@pytest.mark.parametrize("name", MIDDLES)
def test_parameters_outside_of_layers(name):
    assert assert_stacked(lambda: Sequences(MIDDLES[name]), numbers(LENGTH, WIDTH)) > 0


def test_calls_are_looked_up_only_where_they_are_needed():
    assert (
        assert_stacked(lambda: Sequences(lambda net, x: net.linear(x)), numbers(LENGTH, WIDTH)) == 0
    )
    federation = trained(lambda: Sequences(class_token), numbers(LENGTH, WIDTH), "vector")
    functions = [call.function.__name__ for call in federation.engine.direct_calls if call]
    assert functions == ["expand", "__getitem__", "add"]


@pytest.mark.parametrize("dim", [0, 1, None])
def test_weight_norm(dim):
    def model():
        def norm(layer):
            return nn.utils.parametrizations.weight_norm(layer, dim=dim)

        return nn.Sequential(norm(nn.Linear(WIDTH, 6)), nn.Tanh(), norm(nn.Linear(6, CLASSES)))

    assert assert_stacked(model, numbers(WIDTH)) > 0


@pytest.mark.parametrize("batch", [3, LENGTH])
def test_causal_language_model(batch):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
            self.norm, self.qkv = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x):
            h = self.tokens(x) + self.places(torch.arange(x.shape[1]))
            parts = self.qkv(self.norm(h)).chunk(3, dim=-1)
            q, k, v = (p.view(*x.shape, 2, -1).transpose(1, 2) for p in parts)
            p = 0.2 if self.training else 0.0
            heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
            return F.linear(h + heads.transpose(1, 2).flatten(2), self.tokens.weight)

    assert assert_stacked(Model, tokens(), batch) > 0


UNSTACKABLE = {
    "writes to a parameter": (
        lambda net, x: x * net.scale.clone().mul_(2.0),
        "mul_ writes to a tensor, and gets the parameter 'scale'",
    ),
    "attention with dropout": (
        lambda net, x: F.scaled_dot_product_attention(net.positions, x, x, dropout_p=0.1),
        "attention with dropout gets the parameter 'positions'",
    ),
    "mean over the batch": (lambda net, x: x - (x * net.scale).mean(0), "cross-example dependence"),
    "gram matrix": (
        lambda net, x: (x[:, 0] @ x[:, 0].T * net.scale[0])[..., None] * x[:, :1],
        "cross-example dependence",
    ),
}


@pytest.mark.parametrize("name", UNSTACKABLE)
def test_what_cannot_be_stacked_trains_by_vmap_and_says_why(name):
    middle, reason = UNSTACKABLE[name]
    with pytest.warns(EngineWarning, match=reason):
        vector = trained(lambda: Sequences(middle), numbers(LENGTH, WIDTH), "vector")
    loop = trained(lambda: Sequences(middle), numbers(LENGTH, WIDTH), "loop")
    require_close(vector.state.modes, loop.state.modes, "Engines disagree")


def test_another_path_in_training_is_an_error():
    wide = []

    def middle(net, x):
        return x * net.scale + (net.scale if wide else 0)

    engine = trained(lambda: Sequences(middle), numbers(LENGTH, WIDTH), "vector").engine
    wide.append(True)
    model = engine.model
    gradient = stacked_gradient(model, calls=engine.direct_calls)
    start = (part.to(model.dtype) for part in model.init_params(0, 2))
    x, y, weight = randn(2, 3, LENGTH, WIDTH), torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3)
    with pytest.raises(InputError, match=PATH_CHANGED):
        gradient(*start, x, y, weight, torch.arange(2))


CONVOLUTIONS = st.fixed_dictionaries(
    {
        "dims": st.integers(1, 3),
        "transposed": st.booleans(),
        "channels": st.sampled_from([(2, 4), (4, 2), (2, 2)]),
        "kernel_size": st.integers(1, 3),
        "stride": st.integers(1, 2),
        "padding": st.integers(0, 1),
        "dilation": st.integers(1, 2),
        "groups": st.integers(1, 2),
        "bias": st.booleans(),
    }
)


@settings(max_examples=25, deadline=None)
@given(CONVOLUTIONS)
def test_convolutions_of_all_dimensions(options):
    dims, transposed, (inputs, outputs) = (
        options.pop(key) for key in ("dims", "transposed", "channels")
    )
    kind = getattr(nn, f"Conv{'Transpose' * transposed}{dims}d")
    if transposed and options["stride"] > 1:
        options["output_padding"] = 1
    torch.manual_seed(0)
    layer = kind(inputs, outputs, dtype=torch.float64, **options)
    x = randn(2, 3, inputs, *[6] * dims)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = kind(inputs, outputs, **options)

        def forward(self, x):
            return self.layer(x).flatten(1)

    y = randn(2, 3, layer(x[0]).flatten(1).shape[1], seed=1)
    model = FunctionalModel(Model, "mse", y[0], dtype=torch.float64)
    start = model.init_params(0, 2)
    arguments = (*start, x, y, torch.ones(2, 3), torch.arange(2))
    (got, _), (expected, _) = (
        make(*arguments)
        for make in (stacked_gradient(model), model.gradient_function(batched=True))
    )
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


def test_leaves_are_rebuilt_in_their_order():
    value = ([1, slice(2, None, 3)], {"a": (4, torch.Size([5]))}, torch.ones(2, 2).max(0))
    found = list(leaves(value))
    assert found[:7] == [1, 2, None, 3, 4, 5, found[6]]
    counter = iter(range(len(found)))
    again = map_leaves(lambda leaf: next(counter), value)
    assert list(leaves(again)) == list(range(len(found)))
    assert again[:2] == ([0, slice(1, 2, 3)], {"a": (4, (5,))})
    assert again[2].indices == 7
