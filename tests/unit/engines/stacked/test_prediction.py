"""The outputs of many models from stacked passes equal those of single passes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedensemble.engines.stacked import prediction
from fedensemble.engines.stacked.prediction import member_outputs
from fedensemble.modeling.functional_model import FunctionalModel
from fedensemble.models import models
from fedensemble.predict import Ensemble
from fedensemble.runtime import torch_compat

LABELS = torch.zeros(1, dtype=torch.int64)


def mlp():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 3))


class Scaled(nn.Module):
    """Parameters outside of layers."""

    def __init__(self):
        super().__init__()
        self.inner, self.scale = nn.Linear(4, 3), nn.Parameter(torch.randn(3))
        self.token = nn.Parameter(torch.randn(1, 3))

    def forward(self, x):
        return self.inner(x) * self.scale + self.token.expand(len(x), -1)


class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x):
        return self.inner(x - x.mean(0))


class Deciding(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x):
        return self.inner(x) if float(x.sum()) > 0 else -self.inner(x)


class InEvalOnly(Mixing):
    def forward(self, x):
        return self.inner(x) if self.training else super().forward(x)


VECTORS = (4,)
IMAGES = (3, 8, 8)
STACKED = {
    "mlp": (mlp, VECTORS),
    "outside of layers": (Scaled, VECTORS),
    "batch norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(1)),
        IMAGES,
    ),
    "group norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.MaxPool2d(2)),
        IMAGES,
    ),
    "cnn": (lambda: models["cnn"](shape=(1, 28, 28), outputs=10), (1, 28, 28)),
    "resnet20": (lambda: models["resnet20"](shape=IMAGES, outputs=3), IMAGES),
    "vit": (lambda: models["vit"](shape=IMAGES, outputs=3, dropout=0.1), IMAGES),
    "rbf": (models["rbf"], (1,)),
}
ALONE = {"mixing": Mixing, "deciding": Deciding, "in eval only": InEvalOnly}


@pytest.fixture(autouse=True)
def large_models_are_stacked(monkeypatch):
    monkeypatch.setattr(prediction, "_LARGEST_ON_CPU", 1 << 30)
    monkeypatch.setitem(prediction._BLOCK_BYTES, "cpu", 1 << 30)
    monkeypatch.setattr(prediction, "_BY_SPEC", {})


def made(factory, members, seed=0):
    model = FunctionalModel(factory, "cross_entropy", LABELS, dtype=torch.float64)
    theta, buffers = model.init_params(seed, members)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(buffers.shape, generator=generator, dtype=torch.float64)
    return model, theta, buffers + noise  # other running statistics of each model


def reference(model, theta, buffers, x, how, keys):
    """One pass per member, by the functions of FunctionalModel."""
    each = len(keys) // len(theta)
    rows = []
    for number, key in enumerate(keys):
        one = theta[number // each], buffers[number // each], x.clone()
        if how == "mc-dropout":
            rows.append(model.outputs_with_dropout(*one, key))
        else:
            rows.append(model.outputs(*one, None if how == "eval" else key))
    return torch.stack(rows)


@pytest.mark.parametrize("name", STACKED)
@pytest.mark.parametrize("how", ["eval", "dropout", "mc-dropout"])
def test_stacked_equals_one_by_one(name, how):
    factory, shape = STACKED[name]
    model, theta, buffers = made(factory, 3)
    assert prediction._find_stackable(model, torch.randn(7, *shape).double(), how) is not None
    keys = [11, 12, 13, 14, 15, 16]
    for count in (1, 7):
        x = torch.randn(count, *shape, generator=torch.Generator().manual_seed(count)).double()
        before = x.clone()
        got = member_outputs(model, theta, buffers, x, how, keys)
        expected = reference(model, theta, buffers, x, how, keys)
        assert torch.allclose(got, expected, rtol=1e-9, atol=1e-9)
        assert torch.equal(x, before)


@pytest.mark.parametrize("name", ALONE)
def test_what_cannot_be_stacked_runs_one_by_one(name):
    model, theta, buffers = made(ALONE[name], 4)
    x = torch.randn(6, 4, dtype=torch.float64)
    assert prediction._find_stackable(model, x, "eval") is None
    got = member_outputs(model, theta, buffers, x)
    assert torch.equal(got, reference(model, theta, buffers, x, "eval", [None] * 4))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 9), st.integers(1, 5))
def test_blocks_of_any_size(members, samples, inputs, block):
    model, theta, buffers = made(mlp, members)
    x = torch.randn(inputs, 4, dtype=torch.float64)
    keys = list(range(members * samples))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prediction, "_block_size", lambda found, theta, x: block)
        got = member_outputs(model, theta, buffers, x, "mc-dropout", keys)
    expected = reference(model, theta, buffers, x, "mc-dropout", keys)
    assert torch.allclose(got, expected, rtol=1e-9, atol=1e-9)


def test_a_block_of_models_is_bounded_by_memory(monkeypatch):
    model, theta, buffers = made(mlp, 10)
    found = prediction._find_stackable(model, torch.randn(9, 4).double(), "eval")
    assert found.bytes_per_example >= 6 * 8
    monkeypatch.setitem(
        prediction._BLOCK_BYTES, "cpu", 4 * (9 * found.bytes_per_example + theta.shape[1] * 8)
    )
    real, sizes = prediction._stacked, []

    def watch(model, theta, *others):
        sizes.append(len(theta))
        return real(model, theta, *others)

    monkeypatch.setattr(prediction, "_stacked", watch)
    member_outputs(model, theta, buffers, torch.randn(9, 4).double())
    assert sizes == [4, 4, 2]
    monkeypatch.setattr(prediction, "_LARGEST_ON_CPU", 9 * found.bytes_per_example - 1)
    assert len(member_outputs(model, theta, buffers, torch.randn(9, 4).double())) == 10
    assert sizes == [4, 4, 2]


def test_an_ensemble_has_statistics_of_each_predictor():
    model, theta, buffers = made(STACKED["batch norm"][0], 6)
    ensemble = Ensemble(
        model,
        theta[:2],
        buffers[:2],
        predictors=theta.reshape(2, 3, -1),
        predictor_buffers=buffers.reshape(2, 3, -1),
    )
    x = torch.randn(5, *IMAGES, dtype=torch.float64)
    got = ensemble.outputs(x, batch_size=2)
    assert got.shape[:3] == (2, 3, 5)
    for mode in range(2):
        for index in range(3):
            module = ensemble.module(mode, index)
            with torch.no_grad():
                assert torch.allclose(got[mode, index], module(x), rtol=1e-9, atol=1e-9)


def test_without_private_names_of_torch_models_run_one_by_one(monkeypatch):
    model, theta, buffers = made(mlp, 3)
    x = torch.randn(4, 4, dtype=torch.float64)

    def missing(*names):
        raise torch_compat.MissingTorchName("name")

    monkeypatch.setattr(prediction, "_check", missing)
    got = member_outputs(model, theta, buffers, x)
    assert torch.equal(got, reference(model, theta, buffers, x, "eval", [None] * 3))
