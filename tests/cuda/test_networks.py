"""Networks of the speed benchmark, small: gradients on a GPU are those in float64."""

import copy

import pytest
import torch
from torch import nn

from fedensemble import FedAvg, FederatedData, Federation, activation_checkpoint
from fedensemble.bench import networks
from fedensemble.engines.stacked.gradient import stacked_gradient
from fedensemble.modeling.functional_model import FunctionalModel
from fedensemble.models import models

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
VISITS, BATCH, SIDE, LENGTH = 3, 4, 16, 10


class Mixed(nn.Module):
    """Grouped, 3-D and one-dimensional transposed convolutions, RMSNorm."""

    def __init__(self):
        super().__init__()
        self.grouped = nn.Conv2d(3, 12, 3, 2, 1, groups=3)
        self.norm, self.line = nn.RMSNorm(12), nn.ConvTranspose1d(12, 4, 4, 2, 1)
        self.volume, self.out = nn.Conv3d(1, 2, 3, (2, 1, 1), 1), nn.Linear(4, networks.CLASSES)

    def forward(self, x):
        x = self.norm(torch.tanh(self.grouped(x)).movedim(1, -1)).movedim(-1, 1)
        x = x + self.volume(x[:, None]).flatten(1, 2)
        return self.out(self.line(x.flatten(2)).mean(2))


def recurrent(kind, **options):
    def build():
        class Bidirectional(nn.Module):
            def __init__(self):
                super().__init__()
                self.embedding = nn.Embedding(networks.TOKENS, 8)
                self.layers = kind(8, 12, 2, batch_first=True, bidirectional=True, **options)
                self.out = nn.Linear(24, networks.TOKENS)

            def forward(self, x):
                return self.out(self.layers(self.embedding(x))[0])

        return Bidirectional()

    return build


IMAGES, TEXTS = "images", "texts"
CASES = {
    "vit": (lambda: models["vit"]((3, SIDE, SIDE), 10, width=32, depth=2, heads=2), IMAGES),
    "gpt": (lambda: models["gpt"](networks.TOKENS, width=32, depth=2, heads=2), TEXTS),
    "encoder": (lambda: networks.Encoder(32, 1), TEXTS),
    "convnext": (lambda: networks.convnext((16, 24), 1), IMAGES),
    "efficientnet": (lambda: networks.efficientnet((16, 24)), IMAGES),
    "autoencoder": (lambda: networks.autoencoder(16), "pictures"),
    "gru": (recurrent(nn.GRU), TEXTS),
    "rnn": (recurrent(nn.RNN, nonlinearity="relu"), TEXTS),
    "mixed": (Mixed, IMAGES),
}
# bf16 has 8 binary digits; a norm of few numbers multiplies its rounding.
ERRORS = {"float32": 1e-4, "bf16": 0.05}
NORMS_OF_FEW = {
    "efficientnet": {"float32": 1e-3, "bf16": 0.5},
    "autoencoder": {"float32": 1e-4, "bf16": 0.1},
}


def data_of(kind):
    generator = torch.Generator().manual_seed(0)
    count = VISITS * BATCH
    if kind == TEXTS:
        x, y = torch.randint(0, networks.TOKENS, (2, count, LENGTH), generator=generator)
        return FederatedData.from_arrays(x, y, [BATCH] * VISITS, classes=networks.TOKENS)
    x = torch.randn(count, 3, SIDE, SIDE, generator=generator)
    y = torch.arange(count) % networks.CLASSES if kind == IMAGES else x.clone()
    return FederatedData.from_arrays(x, y, [BATCH] * VISITS)


def with_frozen(build, frozen):
    """A factory of copies of one network, of which only some parameters are trained."""
    net = build()
    parameters = list(net.parameters())
    for index, parameter in enumerate(parameters):
        ends = index in (0, 1, len(parameters) - 2, len(parameters) - 1)
        parameter.requires_grad_(ends if frozen == "inner" else index % 2 == 0)
    return lambda: copy.deepcopy(net)


@pytest.mark.parametrize("precision", ERRORS)
@pytest.mark.parametrize("frozen", ["", "inner", "every other"])
@pytest.mark.parametrize("name", CASES)
def test_gradients(name, frozen, precision):
    """Of all parameters, and of some if the others are frozen."""
    build, kind = CASES[name]
    build = with_frozen(build, frozen) if frozen else build
    loss = "mse" if kind == "pictures" else "cross_entropy"
    made = Federation(
        build,
        data_of(kind),
        FedAvg(lr=0.01),
        modes=1,
        batch_size=BATCH,
        loss=loss,
        engine="vector",
        device="cuda",
        engine_options={"precision": precision},
    )
    list(made.rounds(1))
    engine = made.engine
    assert engine.stacked and engine.graphs and not engine.notes
    data = made.data.to("cuda")
    x, y = (values.unflatten(0, (VISITS, BATCH)) for values in (data.x, data.y))
    exact = FunctionalModel(build, loss, y[0], "cuda", torch.float64)
    theta, buffers = exact.init_params(0, VISITS)
    weight, keys = torch.ones(VISITS, BATCH, device="cuda"), torch.arange(VISITS, device="cuda")
    with engine.settings():
        found = [
            engine.gradient(theta.float(), buffers.float(), x, y, weight.bool(), keys)[0]
            for _ in range(2)
        ]
    assert torch.equal(*found)
    x, y = (v.double() if v.is_floating_point() else v for v in (x, y))
    expected = stacked_gradient(exact, calls=engine.direct_calls)(
        theta, buffers, x, y, weight.bool(), keys
    )[0]
    error = float((found[0].double() - expected).norm() / expected.norm())
    assert error < NORMS_OF_FEW.get(name, ERRORS)[precision]


class Checkpointed(nn.Module):
    """Activation checkpointing around layers with dropout, a norm and a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.inner = nn.Linear(6, 8), nn.Linear(8, 8)
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.scale, self.out = nn.Parameter(torch.ones(8)), nn.Linear(8, 3)

    def part(self, x):
        return self.dropout(torch.tanh(self.norm(self.inner(x * self.scale))))

    def forward(self, x):
        return self.out(activation_checkpoint(self.part, torch.tanh(self.first(x))))


def test_activation_checkpointing():
    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = FederatedData.from_arrays(x, torch.arange(24) % 3, [8, 4, 12])
    runs = []
    for engine, device in (("loop", "cpu"), ("vector", "cuda")):
        options = {"engine": engine, "device": device, "dtype": torch.float64}
        runs.append(Federation(Checkpointed, data, FedAvg(lr=0.1), batch_size=4, **options))
        list(runs[-1].rounds(3))
    assert runs[1].engine.stacked and runs[1].engine.graphs, runs[1].engine.notes
    expected, got = (run.state.modes["theta"].cpu() for run in runs)
    assert float((got - expected).abs().max()) < 1e-9
