"""Layers and uses of parameters over random shapes: a stacked pass gives what single passes give.

The check before training sees a few visits and examples; here the same model then trains with other
numbers of both. Gradients, losses and buffers must agree to 1e-9 in float64, with dropout as well.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedensemble.engines.stacked.equivalence import check_stackable
from fedensemble.engines.stacked.gradient import stacked_gradient
from fedensemble.modeling.functional_model import FunctionalModel

CLASSES = 3
few = settings(max_examples=25, deadline=None)
visits, batches, lengths = st.integers(1, 4), st.integers(1, 5), st.integers(2, 5)
flags, dropouts = st.booleans(), st.sampled_from([0.0, 0.3])


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_agree(model, j, batch, *shape, tokens=0):
    """The model is stacked, and equal to single passes with J visits of B examples."""

    def inputs(*leading, seed):
        if not tokens:
            return randn(*leading, *shape, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, tokens, (*leading, *shape), generator=generator)

    y = torch.arange(j * batch).reshape(j, batch) % CLASSES
    functional = FunctionalModel(model, "cross_entropy", y[0], dtype=torch.float64)
    checked = torch.arange(6).reshape(3, 2) % CLASSES
    report = check_stackable(functional, inputs(3, 2, seed=1), checked)
    assert report.reason is None
    start = [rows.to(torch.float64) for rows in functional.init_params(0, j)]
    x, weight, keys = inputs(j, batch, seed=2), torch.ones(j, batch), torch.arange(j) + 7
    weight[-1, 1:] = 0  # padding
    arguments = (*start, x, y, weight, keys)
    got, rest = stacked_gradient(functional, None, report.fusions, calls=report.calls)(*arguments)
    single = functional.gradient_function(batched=False)
    expected = [single(*visit) for visit in zip(*arguments, strict=True)]
    for n, (grad, others) in enumerate(expected):
        for a, b in zip((got[n], *(o[n] for o in rest)), (grad, *others), strict=True):
            assert a.shape == b.shape
            assert not a.numel() or float((a - b).abs().max()) <= 1e-9 * (1 + float(b.abs().max()))


class Around(nn.Module):
    """`middle(self, x)` of inputs [B, T, D], whose outputs are added up to logits."""

    def __init__(self, width, middle, **parts):
        super().__init__()
        self.first, self.middle = nn.Linear(width, width), middle
        for name, part in parts.items():
            made = part()
            self.register_module(name, made) if isinstance(made, nn.Module) else setattr(
                self, name, nn.Parameter(made)
            )

    def forward(self, x):
        out = torch.tanh(self.middle(self, self.first(x)))
        out = out.reshape(len(out), -1)
        return torch.stack([out[:, n::CLASSES].sum(1) for n in range(CLASSES)], 1)


@few
@given(visits, batches, lengths, st.integers(1, 2), st.data())
def test_multi_head_attention(j, batch, length, heads, data):
    width, draw = 4 * heads, data.draw
    options = {name: draw(flags) for name in ("bias", "add_bias_kv", "add_zero_attn")}
    options |= {"dropout": draw(dropouts), "batch_first": draw(flags)}
    call = {"need_weights": draw(flags), "average_attn_weights": draw(flags)}
    if draw(flags):
        call["attn_mask"] = torch.ones(length, length, dtype=torch.bool).triu(1)
    padded, cross = draw(flags), draw(flags)

    def middle(net, x):
        mask = {"key_padding_mask": (x[:, :, 0] > 0) & (torch.arange(length) > 0)} if padded else {}
        inputs = [x, x.flip(1), x * 2] if cross else [x] * 3
        if not options["batch_first"]:
            inputs = [part.transpose(0, 1) for part in inputs]
        out = net.attention(*inputs, **call, **mask)[0]
        return out if options["batch_first"] else out.transpose(0, 1)

    parts = {"attention": lambda: nn.MultiheadAttention(width, heads, **options)}
    assert_agree(lambda: Around(width, middle, **parts), j, batch, length, width)


@few
@given(visits, batches, lengths, st.data())
def test_transformer_layers(j, batch, length, data):
    draw, width = data.draw, 4
    options = {name: draw(flags) for name in ("norm_first", "batch_first", "bias")}
    options |= {"dropout": draw(dropouts), "activation": draw(st.sampled_from(["relu", "gelu"]))}
    kind = draw(st.sampled_from([nn.TransformerEncoderLayer, nn.TransformerDecoderLayer]))
    causal = nn.Transformer.generate_square_subsequent_mask(length) if draw(flags) else None

    def middle(net, x):
        x = x if options["batch_first"] else x.transpose(0, 1)
        if kind is nn.TransformerEncoderLayer:
            out = net.layer(x, src_mask=causal)
        else:
            out = net.layer(x, x + 1, tgt_mask=causal)
        return out if options["batch_first"] else out.transpose(0, 1)

    parts = {"layer": lambda: kind(width, 2, 6, **options)}
    assert_agree(lambda: Around(width, middle, **parts), j, batch, length, width)


@few
@given(visits, batches, lengths, st.sampled_from([(2, 2), (4, 2), (1, 1)]), st.data())
def test_scaled_dot_product_attention(j, batch, length, heads, data):
    draw = data.draw
    options = {"is_causal": draw(flags), "dropout_p": draw(dropouts)}
    options["scale"] = draw(st.sampled_from([None, 0.3]))
    queries, keys = heads
    learned = draw(st.sampled_from(["", "keys", "queries"])) if not options["dropout_p"] else ""

    def middle(net, x):
        q = (x @ net.q).unflatten(-1, (queries, -1)).transpose(1, 2)
        k, v = ((x @ w).unflatten(-1, (keys, -1)).transpose(1, 2) for w in (net.k, net.v))
        if learned == "keys":
            k = net.table.expand(len(x), keys, length, 2)
        if learned == "queries":
            q = net.table.mean(1, keepdim=True).expand(1, queries, length, 2)
        grouped = {"enable_gqa": True} if queries != keys else {}
        return F.scaled_dot_product_attention(q, k, v, **options, **grouped).transpose(1, 2)

    parts = {
        "q": lambda: torch.randn(4, 2 * queries),
        "table": lambda: torch.randn(1, 1, length, 2),
    }
    parts |= {name: lambda: torch.randn(4, 2 * keys) for name in ("k", "v")}
    assert_agree(lambda: Around(4, middle, **parts), j, batch, length, 4)


@few
@given(visits, batches, lengths, st.sampled_from([nn.LSTM, nn.GRU, nn.RNN]), st.data())
def test_recurrent_layers(j, batch, length, kind, data):
    draw, width = data.draw, 3
    options = {name: draw(flags) for name in ("bias", "bidirectional", "batch_first")}
    options |= {"num_layers": draw(st.integers(1, 3))}
    options["dropout"] = draw(dropouts) if options["num_layers"] > 1 else 0.0
    if kind is nn.RNN:
        options["nonlinearity"] = draw(st.sampled_from(["tanh", "relu"]))
    learned = draw(flags)

    def middle(net, x):
        x = x if options["batch_first"] else x.transpose(0, 1)
        many = options["num_layers"] * (2 if options["bidirectional"] else 1)
        start = ()
        if learned:
            examples = x.shape[0 if options["batch_first"] else 1]
            start = net.start.expand(many, examples, 2).contiguous()
            start = ((start, start),) if kind is nn.LSTM else (start,)
        out, last = net.layer(x, *start)
        last = (last[0] if kind is nn.LSTM else last).transpose(0, 1).flatten(1)
        out = out if options["batch_first"] else out.transpose(0, 1)
        return torch.cat([out.flatten(1), last], 1)

    parts = {"layer": lambda: kind(width, 2, **options)}
    parts |= {"start": lambda: torch.randn(1, 1, 2)} if learned else {}
    assert_agree(lambda: Around(width, middle, **parts), j, batch, length, width)


@few
@given(visits, batches, lengths, st.integers(1, 4), st.data())
def test_norms(j, batch, length, width, data):
    draw = data.draw
    shape = draw(st.sampled_from([(width,), (length, width)]))
    affine, centered = draw(flags), draw(flags)
    if centered:
        parts = {"norm": lambda: nn.LayerNorm(shape, 1e-2, affine, bias=draw_bias)}
    else:
        eps = draw(st.sampled_from([None, 1e-2]))
        parts = {"norm": lambda: nn.RMSNorm(shape, eps, affine)}
    draw_bias, batch_second = draw(flags), draw(flags) and len(shape) == 1

    def middle(net, x):
        return net.norm(x.transpose(0, 1)).transpose(0, 1) if batch_second else net.norm(x)

    assert_agree(lambda: Around(width, middle, **parts), j, batch, length, width)


ELEMENTWISE = [
    lambda x, w: x + w,
    lambda x, w: w - x,
    lambda x, w: x * w.sigmoid(),
    lambda x, w: x / (w.abs() + 1),
    lambda x, w: torch.where(x > w, x, w),
    torch.maximum,
    lambda x, w: torch.lerp(x, w, 0.3),
    lambda x, w: x.addcmul(w, x),
    lambda x, w: (w.exp() * x).softmax(-1),
    lambda x, w: x.clone().mul_(w),
    lambda x, w: F.leaky_relu(x) * F.softplus(w),
]


@few
@given(
    visits,
    batches,
    lengths,
    st.integers(2, 4),
    st.sampled_from(ELEMENTWISE),
    st.lists(flags, min_size=2, max_size=2),
    st.integers(0, 3),
)
def test_elementwise(j, batch, length, width, function, kept, dims):
    """Parameters of all shapes that broadcast against inputs [B, T, D]."""
    shape = [size if keep else 1 for size, keep in zip((length, width), kept, strict=True)]
    shape = ([1] * max(0, dims - 2) + shape)[-dims:] if dims else []
    parts = {"w": lambda: torch.randn(shape)}
    model = lambda: Around(width, lambda net, x: function(x, net.w), **parts)  # noqa: E731
    assert_agree(model, j, batch, length, width)


# Of inputs [B, T, D], weights [D, D], vectors [D] and tables [T, D].
PRODUCTS = [
    lambda x, w, v, t: x @ w,
    lambda x, w, v, t: x @ w @ w.T,
    lambda x, w, v, t: (w @ x.mT).mT,
    lambda x, w, v, t: x * (x @ v).unsqueeze(-1),
    lambda x, w, v, t: torch.matmul(t, x.mT),
    lambda x, w, v, t: torch.einsum("btd,de->bte", x, w),
    lambda x, w, v, t: torch.einsum("btd,td,d->bt", x, t, v)[..., None] * x,
    lambda x, w, v, t: F.linear(x, w, v),
    lambda x, w, v, t: F.linear(x, w * v, v.exp()),
    lambda x, w, v, t: F.linear(t, w) + x,
    lambda x, w, v, t: torch.tensordot(x, w, 1),
    lambda x, w, v, t: torch.bmm(x, w.expand(len(x), -1, -1)),
    lambda x, w, v, t: x + torch.outer(v, v)[:1],
    lambda x, w, v, t: x @ torch.linalg.inv(w.mT @ w + torch.eye(len(v), dtype=w.dtype)),
    lambda x, w, v, t: torch.cat([x, t.expand(len(x), -1, -1)], 1),
    lambda x, w, v, t: torch.cat([t[None, :1].expand(x.size(0), -1, -1), x], 1).cumsum(1),
    lambda x, w, v, t: torch.stack([x, t.unsqueeze(0).expand_as(x)], 1).flatten(1, 2),
    lambda x, w, v, t: x * t[: x.shape[1]] + w[0, 1:].sum() - w[:, -1],
    lambda x, w, v, t: x + t[torch.arange(x.shape[1]).flip(0)] + t.roll(1, 0).flip(1),
    lambda x, w, v, t: x * w.diagonal() + w.triu().sum(0) + t.mean(0),
    lambda x, w, v, t: x + F.embedding(torch.arange(x.shape[1]), t @ w),
    lambda x, w, v, t: x + F.embedding((x[..., 0] > 0).long(), t),
    lambda x, w, v, t: x + t.gather(0, torch.zeros(1, t.shape[1], dtype=torch.long)),
    lambda x, w, v, t: F.layer_norm(x, v.shape, v, w[0]) + F.normalize(w, dim=0)[0],
    lambda x, w, v, t: x.baddbmm(x, w.repeat(len(x), 1, 1)),
    lambda x, w, v, t: F.conv1d(x.mT, w[:, :, None], v).mT,
    lambda x, w, v, t: F.pad(t, (0, 0, 1, 0))[:-1] * x,
    lambda x, w, v, t: x.clone().index_add(1, torch.zeros(1, dtype=torch.long), x[:, :1] * v),
]


@pytest.mark.parametrize("function", PRODUCTS)
@settings(max_examples=4, deadline=None)
@given(j=visits, batch=batches, length=lengths, width=st.integers(2, 4))
def test_products_and_indexing(function, j, batch, length, width):
    parts = {"w": lambda: torch.randn(width, width), "v": lambda: torch.randn(width)}
    parts["t"] = lambda: torch.randn(length, width)
    model = lambda: Around(  # noqa: E731
        width, lambda net, x: function(x, net.w, net.v, net.t), **parts
    )
    assert_agree(model, j, batch, length, width)


@few
@given(visits, batches, lengths, dropouts, flags, flags)
def test_tied_embeddings_and_positions(j, batch, length, dropout, tied, frozen):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(CLASSES, 4)
            self.positions = nn.Parameter(torch.randn(length, 4), requires_grad=not frozen)
            self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout, batch_first=True)
            self.out = nn.Linear(4, CLASSES)

        def forward(self, x):
            h = self.layer(self.embedding(x) + self.positions)
            weight = self.embedding.weight if tied else self.out.weight
            return F.linear(h, weight, self.out.bias).mean(1)

    assert_agree(Model, j, batch, length, tokens=CLASSES)
