"""Swapping parameters into a module: it trains as in plain torch, whatever its submodules share."""

from copy import deepcopy
from functools import partial
from threading import Lock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fedensemble import FedAvg, Federation, InputError
from fedensemble.engines.local import thread_pool
from fedensemble.modeling.parameter_swap import swap_parameters
from fedensemble.testing.assertions import require_close
from fedensemble.testing.reference import without_ensemble
from fedensemble.testing.toy_problems import CLASSES, FEATURES, classification

both_engines = pytest.mark.parametrize("engine", ["loop", "vector"])


def made(model, engine="loop", **options):
    settings = {"modes": 1, "epochs": 2, "batch_size": 4, "dtype": torch.float64, **options}
    return Federation(model, classification(), FedAvg(lr=0.1), engine=engine, **settings)


def trained(model, engine="loop", **options):
    federation = made(model, engine, **options)
    list(federation.rounds(2))
    return federation


class Tied(nn.Module):
    """A submodule with two names, whose weights are tied to another submodule, as in T5."""

    def __init__(self):
        super().__init__()
        self.shared, self.other = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.encoder, self.other.weight = self.shared, self.shared.weight
        self.out = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        return self.out(self.other(torch.tanh(self.encoder(x)) + self.shared(x)))


class Checkpointed(nn.Module):
    def __init__(self, again=True, p=0.0):
        super().__init__()
        self.inside = nn.Sequential(
            nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(p), nn.Tanh()
        )
        self.out, self.again = nn.Linear(8, CLASSES), again

    def forward(self, x):
        return self.out(
            checkpoint(self.inside, x, use_reentrant=False) if self.again else self.inside(x)
        )


class Hiding(Checkpointed):
    def forward(self, x):
        return self.out(checkpoint(self.inside, x.requires_grad_(), use_reentrant=True))


class WithAuxiliary(nn.Linear):
    def forward(self, x):
        out = super().forward(x)
        return (out, out) if self.training else out


class Turned(nn.Linear):
    """Rotates pairs of features by angles, as rotary position embeddings do."""

    def __init__(self):
        super().__init__(FEATURES, CLASSES)
        self.register_buffer(
            "turn", torch.polar(torch.ones(FEATURES // 2), torch.arange(FEATURES // 2) + 1.0)
        )

    def forward(self, x):
        pairs = torch.view_as_complex(x.reshape(len(x), -1, 2)) * self.turn.to(torch.complex128)
        return super().forward(torch.view_as_real(pairs).flatten(1))


class Locked(nn.Linear):
    def __init__(self):
        super().__init__(FEATURES, CLASSES)
        self.lock = Lock()


@both_engines
@pytest.mark.parametrize("model", [Tied, Turned])
def test_as_plain_torch(model, engine):
    federation = made(model, engine)
    expected, _ = without_ensemble(FedAvg(lr=0.1), federation, 2)
    list(federation.rounds(2))
    got = {name: value[0] for name, value in federation.state.modes.items()}
    require_close(got, expected, "Not as in plain torch")
    x = classification().x[:5]
    module = federation.ensemble.module(0)
    module = module.eval()
    predicted = federation.ensemble.predict(x).mean
    torch.testing.assert_close(predicted, module(x.double()).softmax(-1).to(predicted.dtype))


def test_checkpointing():
    got, expected = (trained(partial(Checkpointed, again)) for again in (True, False))
    require_close(got.state.modes, expected.state.modes, "Checkpointing changes the gradient")
    with pytest.raises(InputError, match="engine 'loop', which can"):
        made(Checkpointed, "vector")
    with pytest.raises(InputError, match="checkpoint, which draws again"):
        made(partial(Checkpointed, p=0.5))


@both_engines
def test_checkpointing_that_hides_its_gradient(engine):
    with pytest.raises(InputError, match="use_reentrant=False"):
        made(Hiding, engine)


def test_a_submodule_that_all_models_share(monkeypatch):
    """As a pretrained backbone: without copies, threads would write to it at the same time."""
    monkeypatch.setattr(thread_pool, "_WORTH", 0)
    monkeypatch.setattr(thread_pool, "available_threads", lambda: 3)
    part = nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    before = [(p, p.detach().clone()) for p in part.parameters()]
    federation = made(
        lambda: nn.Sequential(part, nn.Linear(64, CLASSES)), "vector", modes=2, strata=2
    )
    functional_models = [federation.model, *(federation.model.clone_module() for _ in "ab")]
    models = [part, *(functional_model.training_model for functional_model in functional_models)]
    assert len({id(m) for model in models for m in model.modules()}) == sum(
        1 for m in models for _ in m.modules()
    )
    theta, other = federation.state.modes["theta"]
    assert torch.equal(theta[: part[0].weight.numel()], part[0].weight.detach().double().flatten())
    assert not torch.equal(theta, other)
    list(federation.rounds(2))
    own = trained(lambda: nn.Sequential(deepcopy(part), nn.Linear(64, CLASSES)), modes=2, strata=2)
    require_close(
        federation.state.modes, own.state.modes, "Sharing a submodule changes the results"
    )
    for now, (same, value) in zip(part.parameters(), before, strict=True):
        assert now is same
        assert now.dtype == value.dtype
        assert torch.equal(now, value)


def test_a_shared_submodule_that_cannot_be_copied():
    part = torch.nn.utils.parametrizations.weight_norm(nn.Linear(FEATURES, 4))
    part.register_buffer("made", part.weight * 1)  # a result of autograd, which torch does not copy
    with pytest.raises(InputError, match="share a submodule, which cannot be copied"):
        made(lambda: nn.Sequential(part, nn.Linear(4, CLASSES)))


@both_engines
def test_a_model_that_returns_more_in_training(engine):
    with pytest.raises(InputError, match="one tensor, also in training; got tuple"):
        made(partial(WithAuxiliary, FEATURES, CLASSES), engine)


@both_engines
@pytest.mark.filterwarnings(
    "ignore:.*weight_norm:FutureWarning", "ignore:There is a performance drop:UserWarning"
)
@pytest.mark.filterwarnings("ignore::fedensemble.errors.EngineWarning")
def test_a_model_that_cannot_be_copied(engine):
    for model in (lambda: torch.nn.utils.weight_norm(nn.Linear(FEATURES, CLASSES)), Locked):
        assert next(made(model, engine).rounds(1)).losses.isfinite().all()


@both_engines
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.filterwarnings(
    "ignore::fedensemble.errors.EngineWarning", "ignore:There is a performance drop:UserWarning"
)
def test_a_scripted_submodule(engine):
    federation = made(
        lambda: nn.Sequential(torch.jit.script(nn.Linear(FEATURES, 8)), nn.Linear(8, CLASSES)),
        engine,
    )
    expected, _ = without_ensemble(FedAvg(lr=0.1), federation, 2)
    list(federation.rounds(2))
    got = {name: value[0] for name, value in federation.state.modes.items()}
    require_close(got, expected, "Not as in plain torch")


def test_original_tensors_are_restored():
    module = nn.BatchNorm1d(2)
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    replacements = {name: torch.full_like(tensor, 3) for name, tensor in own.items()}
    tensors = dict(replacements)

    def fail():
        with swap_parameters(module, tensors):
            assert module.weight is replacements["weight"]
            module.running_mean = torch.ones(2)
            return 1 / 0

    with pytest.raises(ZeroDivisionError):
        fail()
    assert tensors["running_mean"].tolist() == [1, 1]
    assert tensors["weight"] is replacements["weight"]
    assert all(getattr(module, name) is tensor for name, tensor in own.items())
