"""Frozen parameters in stacked passes: one copy for all visits, and the results of single passes."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fedensemble as fe
from fedensemble.engines.stacked.equivalence import check_stackable
from fedensemble.engines.stacked.gradient import stacked_gradient
from fedensemble.errors import EngineWarning
from fedensemble.modeling.functional_model import FunctionalModel

CLASSES, WIDTH, LENGTH, TOKENS = 3, 4, 5, 7


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Between(nn.Module):
    """`part` of inputs from a trained layer, whose outputs a trained layer gets."""

    def __init__(self, part, first, use=None):
        super().__init__()
        self.first, self.part, self.use = first(), part, use
        self.low = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        h = self.first(x) * (1 + 0.1 * self.low.mean())
        out = torch.tanh(self.part(h) if self.use is None else self.use(self, h))
        out = out.reshape(len(out), -1)
        return torch.stack([out[:, n::CLASSES].sum(1) for n in range(CLASSES)], 1)


def sequences():
    return nn.Linear(WIDTH, WIDTH)


def images():
    return nn.Conv2d(2, WIDTH, 3, padding=1)


def attend(model, h):
    return h + model.part(h, h, h)[0]


class Positions(nn.Module):
    """Positions and a class token, both looked up without a batch."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(LENGTH, WIDTH)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))

    def forward(self, h):
        token = self.token.expand(len(h), -1, -1)
        return torch.cat([token, h + self.table(torch.arange(LENGTH))], 1)


class Adapter(nn.Module):
    """A low-rank change of a layer's weight, added to the weight itself."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 6)
        self.a, self.b = nn.Parameter(torch.randn(6, 2)), nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, h):
        changed = F.linear(h, self.layer.weight + self.a @ self.b, self.layer.bias)
        return changed + h @ self.layer.weight.T + F.linear(h, 2 * self.layer.weight)


def recurrent(model, h):
    return model.part(h)[0]


# name: (what is frozen, what comes before it, how it is called)
PARTS = {
    "Linear": (lambda: nn.Linear(WIDTH, 6), sequences, None),
    "LayerNorm": (lambda: nn.LayerNorm(WIDTH), sequences, None),
    "RMSNorm": (lambda: nn.RMSNorm(WIDTH), sequences, None),
    "MultiheadAttention": (
        lambda: nn.MultiheadAttention(WIDTH, 2, dropout=0.3, batch_first=True, add_bias_kv=True),
        sequences,
        attend,
    ),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, 6, dropout=0.2, batch_first=True),
        sequences,
        None,
    ),
    "LSTM": (lambda: nn.LSTM(WIDTH, 3, 2, dropout=0.3, batch_first=True), sequences, recurrent),
    "GRU": (lambda: nn.GRU(WIDTH, 3, batch_first=True, bidirectional=True), sequences, recurrent),
    "positions": (Positions, sequences, None),
    "adapter": (Adapter, sequences, None),
    "Conv2d": (lambda: nn.Conv2d(WIDTH, 3, 3), images, None),
    "grouped Conv2d": (lambda: nn.Conv2d(WIDTH, 6, 3, stride=2, groups=2), images, None),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(WIDTH, 3, 2), images, None),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(WIDTH), images, None),
    "GroupNorm": (lambda: nn.GroupNorm(2, WIDTH), images, None),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(WIDTH, affine=True), images, None),
    "PReLU": (lambda: nn.PReLU(WIDTH), images, None),
}


def with_frozen(name, trained=()):
    """A factory of models in which a part is frozen, except for parameters of these indices."""
    make, first, use = PARTS[name]
    torch.manual_seed(1)
    part = make().double()
    for parameter in part.parameters():
        nn.init.normal_(parameter, std=0.5)
    for index, parameter in enumerate(part.parameters()):
        parameter.requires_grad_(index in trained)
    return lambda: Between(copy.deepcopy(part), first, use)


def inputs(name, *leading, seed):
    shape = (2, 6, 6) if PARTS[name][1] is images else (LENGTH, WIDTH)
    return randn(*leading, *shape, seed=seed)


def gradients(name, factory, j=3, batch=4, dtype=torch.float64, compute=None):
    """Stacked gradients of J visits, the same from single passes, and the model."""
    y = torch.arange(j * batch).reshape(j, batch) % CLASSES
    model = FunctionalModel(factory, "cross_entropy", y[0], dtype=dtype)
    checked = inputs(name, 3, 2, seed=1).to(dtype)
    report = check_stackable(model, checked, torch.arange(6).reshape(3, 2) % CLASSES)
    assert report.reason is None
    start = [rows.to(dtype) for rows in model.init_params(0, j)]
    weight, keys = torch.ones(j, batch), torch.arange(j) + 7
    weight[-1, 2:] = 0  # padding
    arguments = (*start, inputs(name, j, batch, seed=2).to(dtype), y, weight, keys)
    stacked = stacked_gradient(model, compute, report.fusions, calls=report.calls)(*arguments)
    single = model.gradient_function(batched=False)
    return stacked, [single(*visit) for visit in zip(*arguments, strict=True)], model


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(PARTS)), st.integers(1, 4), st.integers(2, 4), st.data())
def test_a_stacked_pass_gives_what_single_passes_give(name, j, batch, data):
    """With all of a layer's parameters frozen, and with some beside trained ones."""
    count = len(list(PARTS[name][0]().parameters()))
    trained = data.draw(st.sets(st.integers(0, count - 1)) | st.just(set()), "trained")
    (got, rest), expected, model = gradients(name, with_frozen(name, trained), j, batch)
    assert len(model.frozen) == count - len(trained)
    for n, (grad, others) in enumerate(expected):
        for a, b in zip((got[n], *(o[n] for o in rest)), (grad, *others), strict=True):
            assert a.shape == b.shape
            assert not a.numel() or float((a - b).abs().max()) <= 1e-9 * (1 + float(b.abs().max()))
        # The layer below gets its gradient through the frozen part.
        below = model.theta_layout.unflatten(grad)["first.weight"]
        assert float(below.abs().max()) > 1e-6


@pytest.mark.parametrize("name", sorted(PARTS))
def test_bf16_matmuls_take_frozen_parameters(name):
    """A GPU's bf16 path, on a CPU: activations of bf16 meet parameters of float32."""
    factory = with_frozen(name)
    (got, _), expected, _ = gradients(name, factory, dtype=torch.float32, compute=torch.bfloat16)
    for grad, (wanted, _) in zip(got, expected, strict=True):
        assert grad.dtype == torch.float32
        # bf16 has 8 binary digits
        assert float((grad - wanted).norm()) <= 0.06 * float(wanted.norm())


class LargestResult(TorchDispatchMode):
    """The most elements of a tensor's storage that any operator returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                size = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.largest = max(self.largest, size)
        return out


def test_no_tensor_of_a_stacked_pass_holds_frozen_parameters_of_several_visits():
    wide, j, batch = 200, 6, 2
    body = nn.Linear(wide, wide)

    def factory():
        frozen = copy.deepcopy(body).requires_grad_(False)
        return nn.Sequential(nn.Linear(WIDTH, wide), frozen, nn.ReLU(), nn.Linear(wide, CLASSES))

    y = torch.zeros(j, batch, dtype=torch.int64)
    model = FunctionalModel(factory, "cross_entropy", y[0])
    start = model.init_params(0, j)
    run = stacked_gradient(model)
    arguments = (*start, randn(j, batch, WIDTH).float(), y, torch.ones(j, batch), torch.arange(j))
    with LargestResult() as seen:
        run(*arguments)
    # Views of the one copy, and no stack of it; a copy per visit would be 6 times as large.
    assert seen.largest == wide * wide
    assert start[0].shape == (j, 5 * wide + 3 * wide + 3) and start[1].shape == (j, 0)


def test_all_modules_of_a_model_have_the_one_copy():
    body = nn.Linear(WIDTH, WIDTH)

    def factory():
        return nn.Sequential(
            copy.deepcopy(body).requires_grad_(False), nn.Dropout(), nn.Linear(4, 2)
        )

    model = FunctionalModel(factory, "cross_entropy", torch.zeros(1, dtype=torch.int64))
    clone = model.clone_module()
    modules = [
        *(model.training_model, model.eval_model, model.dropout_model),
        *(model.train_mode_model, model.mc_dropout_model),
        *(clone.training_model, clone.eval_model),
    ]
    address = model.frozen["0.weight"].data_ptr()
    assert address != body.weight.data_ptr()  # the user's own is never touched
    assert {module[0].weight.data_ptr() for module in modules} == {address}
    assert not any(module[0].weight.requires_grad for module in modules)


def test_vmap_takes_frozen_parameters():
    """A model that cannot be stacked: its forward pass depends on the batch size."""
    body = nn.Linear(WIDTH, WIDTH)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
            self.body = copy.deepcopy(body).requires_grad_(False)

        def forward(self, x):
            h = self.body(self.first(x))
            return self.last(h - h.mean(0) / len(x))

    x = randn(40, WIDTH)
    data = fe.FederatedData.from_arrays(x, (x.sum(1) > 0).long(), [8, 12, 20])
    states = []
    for engine in ("loop", "vector"):
        settings = {"modes": 2, "strata": 1, "batch_size": 4, "last_batch": "drop"}
        with pytest.warns(EngineWarning) if engine == "vector" else nullcontext():
            made = fe.Federation(
                Model, data, fe.FedAvg(lr=0.3), engine=engine, dtype=torch.float64, **settings
            )
        made.train(3)
        states.append(made.state.modes["theta"])
    torch.testing.assert_close(*states, rtol=0, atol=1e-12)
