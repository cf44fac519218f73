"""Buffers and parameters change in training as in plain torch, or the model is rejected before."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedensemble import EngineWarning, FedAvg, FederatedData, Federation, InputError
from fedensemble.testing.assertions import require_close
from fedensemble.testing.toy_problems import CLASSES, FEATURES, classification, labels, numbers

DATA = classification()
BATCH, STEPS, RATE = 5, 3, 0.1
both_engines = pytest.mark.parametrize("engine", ["loop", "vector"])


class Centered(nn.Linear):
    """Subtracts a running mean of its inputs, which `update` updates."""

    def __init__(self, update):
        super().__init__(FEATURES, CLASSES)
        self.update = update
        self.register_buffer("mean", torch.zeros(FEATURES))

    def forward(self, x):
        if self.training:
            self.update(self, x)
        return super().forward(x - self.mean)


def assign(model, x):
    model.mean = 0.9 * model.mean + 0.1 * x.mean(0).detach()


def write(model, x):
    model.mean.mul_(0.9).add_(0.1 * x.mean(0))


def only_assign(model, x):
    model.mean = x.mean(0)


def of_weights(model, x):
    model.mean = 0.9 * model.mean + 0.1 * model.weight.mean(0)


class Forgetting(nn.Linear):
    """Sets its buffer to None in training."""

    def __init__(self):
        super().__init__(FEATURES, CLASSES)
        self.register_buffer("mean", torch.zeros(FEATURES))

    def forward(self, x):
        if self.training:
            self.mean = None
        return super().forward(x)


class Counting(nn.Linear):
    """Divides by a count of its forward passes, of type `dtype`."""

    def __init__(self, dtype, assigned):
        super().__init__(FEATURES, CLASSES)
        self.assigned = assigned
        self.register_buffer("passes", torch.zeros((), dtype=dtype))

    def forward(self, x):
        if self.training and self.assigned:
            self.passes = self.passes + 1
        elif self.training:
            self.passes += 1
        return super().forward(x) / (self.passes + 1)


def federation(model, engine, data=DATA, **options):
    return Federation(
        model, data, FedAvg(lr=RATE), engine=engine, dtype=torch.float64, **{"modes": 2, **options}
    )


def train_with_torch(federation, x, y):
    """Parameters and buffers after some steps on one batch, in plain torch."""
    model = federation.ensemble.module(0).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        for buffer in model.buffers():
            buffer.detach_()
    return federation.model.flatten_module(model)


@pytest.mark.filterwarnings("ignore::fedensemble.EngineWarning")
@both_engines
@pytest.mark.parametrize(
    "model",
    [
        *(
            lambda update=update: Centered(update)
            for update in (assign, write, only_assign, of_weights)
        ),
        lambda: Counting(torch.float64, assigned=True),
        lambda: Counting(torch.float64, assigned=False),
        lambda: nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES)),
        lambda: nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.BatchNorm1d(CLASSES)),
    ],
    ids=[
        "assigned",
        "written",
        "only assigned",
        "of weights",
        "count assigned",
        "count",
        "BatchNorm",
        "BatchNorm last",
    ],
)
def test_buffers_move_as_in_torch(engine, model):
    x, y = numbers(BATCH, FEATURES), labels(BATCH, classes=CLASSES)
    data = FederatedData.from_clients([(x, y)])
    trained = federation(model, engine, data, modes=1, batch_size=BATCH, epochs=STEPS)
    theta, buffers = train_with_torch(trained, x.double(), y)
    assert buffers.abs().max() > 0
    next(trained.rounds(1))
    got = {"theta": trained.state.modes["theta"][0], "buffers": trained.state.buffers[0]}
    require_close(got, {"theta": theta, "buffers": buffers}, "Not as in plain torch")


@pytest.mark.filterwarnings("ignore::fedensemble.EngineWarning")
@pytest.mark.parametrize("update", [assign, only_assign, of_weights])
def test_engines_agree_on_assigned_buffers(update):
    trained = [
        federation(lambda: Centered(update), engine, batch_size=3) for engine in ("loop", "vector")
    ]
    for each in trained:
        list(each.rounds(3))
    looped, batched = ({**each.state.modes, "buffers": each.state.buffers} for each in trained)
    require_close(batched, looped, "Engines disagree")
    assert not trained[0].state.buffers.requires_grad


class Kept(nn.Linear):
    def __init__(self):
        super().__init__(FEATURES, CLASSES)
        self.register_buffer("last", torch.zeros(1, FEATURES))

    def forward(self, x):
        self.last = x
        return super().forward(x)


class Shrinking(nn.Linear):
    def __init__(self):
        super().__init__(FEATURES, CLASSES)

    def forward(self, x):
        self.weight.data.mul_(0.5)
        return super().forward(x)


class Drawing(nn.Linear):
    def __init__(self, draw):
        super().__init__(FEATURES, CLASSES)
        self.draw = draw

    def forward(self, x):
        return super().forward(self.draw(x))


class Embedded(nn.Module):
    def __init__(self, kind=nn.Embedding, **options):
        super().__init__()
        self.table, self.out = kind(FEATURES, 4, **options), nn.Linear(4, CLASSES)

    def forward(self, x):
        rows = self.table((x > 0).long())
        return self.out(rows.mean(1) if rows.dim() == 3 else rows)


class NeedsFour(nn.Linear):
    """Takes batches of four only."""

    def __init__(self):
        super().__init__(FEATURES, CLASSES)

    def forward(self, x):
        return super().forward(x.reshape(4, -1, FEATURES).flatten(0, 1))


REJECTED = {
    "a count": (
        lambda: Counting(torch.int64, assigned=False),
        "its buffer 'passes' of torch.int64.*as floating point",
    ),
    "an assigned count": (
        lambda: Counting(torch.int64, assigned=True),
        "its buffer 'passes' of torch.int64",
    ),
    "another shape": (
        Kept,
        r"buffer 'last' of shape \(1, 4\) becomes shape \(2, 4\) in training",
    ),
    "nothing": (Forgetting, r"buffer 'mean' of shape \(4,\) becomes None in training"),
    "its weights": (Shrinking, "changes its parameters in the forward pass"),
    "embedding, max_norm": (
        lambda: Embedded(max_norm=1.0),
        "Embedding with max_norm.*remove max_norm",
    ),
    "embedding, sparse": (
        lambda: Embedded(sparse=True),
        "Embedding with sparse=True.*the results are the same",
    ),
    "bag, sparse": (
        lambda: Embedded(nn.EmbeddingBag, sparse=True),
        "EmbeddingBag with sparse=True",
    ),
    "dropout_": (
        lambda: Drawing(lambda x: torch.dropout_(x.clone(), 0.5, True)),
        "draws random values",
    ),
    "native_dropout": (
        lambda: Drawing(lambda x: torch.native_dropout(x, 0.5, True)[0]),
        "draws random values",
    ),
    "alpha_dropout": (
        lambda: nn.Sequential(nn.AlphaDropout(), nn.Linear(FEATURES, CLASSES)),
        "torch's alpha_dropout",
    ),
}


@both_engines
@pytest.mark.parametrize("name", REJECTED)
def test_models_that_are_rejected_before_training(engine, name):
    model, message = REJECTED[name]
    with pytest.raises(InputError, match=message):
        federation(model, engine, batch_size=3)


@both_engines
def test_an_error_in_the_backward_pass(engine):
    class InPlace(nn.Linear):
        def forward(self, x):
            hidden = super().forward(x).exp()
            hidden[:, 0] = 1.0  # overwrites values that backward needs
            return hidden

    with pytest.raises(
        InputError, match=r"cannot be trained on inputs of shape \(3, 4\) torch.float64: .*inplace"
    ):
        federation(lambda: InPlace(FEATURES, CLASSES), engine, batch_size=3)


@both_engines
def test_an_error_without_a_message(engine):
    class Silent(nn.Linear):
        def forward(self, x):
            if self.training:
                raise ValueError
            return super().forward(x)

    with pytest.raises(InputError, match=r"cannot be trained.*: ValueError"):
        federation(lambda: Silent(FEATURES, CLASSES), engine)


def test_a_model_for_batches_of_one_size():
    """The check with two examples fails, the check with a complete batch does not."""
    assert next(federation(NeedsFour, "loop", batch_size=4).rounds(1)).losses.isfinite().all()
    with pytest.raises(InputError, match=r"cannot be trained on inputs of shape \(3, 4\)"):
        federation(NeedsFour, "loop", batch_size=3)


def test_the_checks_have_no_side_effects():
    """A model's Python attributes and torch's generator are as before."""

    class PassCounter(nn.Linear):
        passes = 0

        def forward(self, x):
            self.passes += 1
            return super().forward(x)

    state = torch.get_rng_state()
    made = federation(lambda: PassCounter(FEATURES, CLASSES), "loop")
    assert made.model.training_model.passes == 0
    assert torch.equal(state, torch.get_rng_state())


LOSSES = {
    "if": (
        lambda o, t: F.cross_entropy(o, t) if o.max() > 0 else F.cross_entropy(o, t) * 1,
        "data-dependent.*torch.where",
    ),
    "item": (
        lambda o, t: F.cross_entropy(o, t) * (o.max().item() > -1e9),
        r"\.item\(\).*torch.where",
    ),
    "shapes": (
        lambda o, t: (o - t.reshape(1, -1)).square().mean(),
        r"cannot take outputs of shape \(8, 3\)",
    ),
}


@both_engines
@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_are_rejected(engine, name):
    loss, message = LOSSES[name]
    with pytest.raises(InputError, match=message):
        federation(lambda: nn.Linear(FEATURES, CLASSES), engine, loss=loss)


def test_a_fallback_to_vmap_is_a_warning():
    with pytest.warns(
        EngineWarning, match="cannot be batched layer by layer.*using vmap"
    ) as caught:
        made = federation(lambda: Centered(assign), "vector")
    assert [str(each.message) for each in caught] == list(made.engine.notes)
    assert caught[0].filename == __file__  # where the federation is constructed


@both_engines
def test_a_hook_may_keep_its_outputs(engine):
    """Such a module cannot be copied after its first forward pass."""

    def model():
        net = nn.Sequential(nn.Linear(FEATURES, 5), nn.ReLU(), nn.Linear(5, CLASSES))
        net.seen = []
        net[0].register_forward_hook(lambda module, inputs, out: net.seen.append(out))
        return net

    assert next(federation(model, engine, batch_size=BATCH).rounds(1)).losses.isfinite().all()
