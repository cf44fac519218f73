"""What a model does to its buffers and parameters in training is as in plain torch, or refused
before training.
"""

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


class Centred(nn.Linear):
    """Subtracts a running mean of its inputs, which `update` moves."""

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
    """Has a buffer until it is trained."""

    def __init__(self):
        super().__init__(FEATURES, CLASSES)
        self.register_buffer("mean", torch.zeros(FEATURES))

    def forward(self, x):
        if self.training:
            self.mean = None
        return super().forward(x)


class Counting(nn.Linear):
    """Divides by a count of its passes, which is of type `dtype`."""

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


def by_torch(federation, x, y):
    """Weights and buffers after some steps on one batch, by nothing but torch."""
    model = federation.ensemble.module(0).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        for buffer in model.buffers():
            buffer.detach_()
    return federation.learner.flatten_module(model)


@pytest.mark.filterwarnings("ignore::fedensemble.EngineWarning")
@both_engines
@pytest.mark.parametrize(
    "model",
    [
        *(
            lambda update=update: Centred(update)
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
    theta, buffers = by_torch(trained, x.double(), y)
    assert buffers.abs().max() > 0
    next(trained.rounds(1))
    got = {"theta": trained.state.modes["theta"][0], "buffers": trained.state.buffers[0]}
    require_close(got, {"theta": theta, "buffers": buffers}, "Not as by torch")


@pytest.mark.filterwarnings("ignore::fedensemble.EngineWarning")
@pytest.mark.parametrize("update", [assign, only_assign, of_weights])
def test_engines_agree_on_assigned_buffers(update):
    trained = [
        federation(lambda: Centred(update), engine, batch_size=3) for engine in ("loop", "vector")
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
        found = self.table((x > 0).long())
        return self.out(found.mean(1) if found.dim() == 3 else found)


class NeedsFour(nn.Linear):
    """Takes batches of four only."""

    def __init__(self):
        super().__init__(FEATURES, CLASSES)

    def forward(self, x):
        return super().forward(x.reshape(4, -1, FEATURES).flatten(0, 1))


REFUSED = {
    "a count": (
        lambda: Counting(torch.int64, assigned=False),
        "its buffer 'passes' of torch.int64.*as floats",
    ),
    "an assigned count": (
        lambda: Counting(torch.int64, assigned=True),
        "its buffer 'passes' of torch.int64",
    ),
    "another shape": (
        Kept,
        r"buffer 'last' of shape \(1, 4\) another one in training, shape \(2, 4\)",
    ),
    "nothing": (Forgetting, r"buffer 'mean' of shape \(4,\) another one in training, None"),
    "its weights": (Shrinking, "changes its parameters in the forward pass"),
    "embedding, max_norm": (
        lambda: Embedded(max_norm=1.0),
        "Embedding with max_norm.*leave max_norm out",
    ),
    "embedding, sparse": (
        lambda: Embedded(sparse=True),
        "Embedding with sparse=True.*the numbers stay the same",
    ),
    "bag, sparse": (
        lambda: Embedded(nn.EmbeddingBag, sparse=True),
        "EmbeddingBag with sparse=True",
    ),
    "dropout_": (
        lambda: Drawing(lambda x: torch.dropout_(x.clone(), 0.5, True)),
        "draws random numbers",
    ),
    "native_dropout": (
        lambda: Drawing(lambda x: torch.native_dropout(x, 0.5, True)[0]),
        "draws random numbers",
    ),
    "alpha_dropout": (
        lambda: nn.Sequential(nn.AlphaDropout(), nn.Linear(FEATURES, CLASSES)),
        "torch's alpha_dropout",
    ),
    "attention": (
        lambda: Drawing(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)),
        "Dropout inside attention",
    ),
}


@both_engines
@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_training(engine, name):
    model, says = REFUSED[name]
    with pytest.raises(InputError, match=says):
        federation(model, engine, batch_size=3)


@both_engines
def test_what_only_training_can_tell(engine):
    class InPlace(nn.Linear):
        def forward(self, x):
            hidden = super().forward(x).exp()
            hidden[:, 0] = 1.0  # backward needs what stood there
            return hidden

    with pytest.raises(
        InputError, match=r"cannot be trained on inputs of shape \(3, 4\) torch.float64: .*inplace"
    ):
        federation(lambda: InPlace(FEATURES, CLASSES), engine, batch_size=3)


@both_engines
def test_an_error_without_a_word(engine):
    class Silent(nn.Linear):
        def forward(self, x):
            if self.training:
                raise ValueError
            return super().forward(x)

    with pytest.raises(InputError, match=r"cannot be trained.*: ValueError"):
        federation(lambda: Silent(FEATURES, CLASSES), engine)


def test_a_model_for_batches_of_one_size():
    """The trial with two examples fails, that with a whole batch does not."""
    assert next(federation(NeedsFour, "loop", batch_size=4).rounds(1)).losses.isfinite().all()
    with pytest.raises(InputError, match=r"cannot be trained on inputs of shape \(3, 4\)"):
        federation(NeedsFour, "loop", batch_size=3)


def test_the_trial_leaves_no_trace():
    """What a model keeps in Python, and torch's generator, stand as before."""

    class Noting(nn.Linear):
        passes = 0

        def forward(self, x):
            self.passes += 1
            return super().forward(x)

    state = torch.get_rng_state()
    made = federation(lambda: Noting(FEATURES, CLASSES), "loop")
    assert made.learner.training_model.passes == 0
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
def test_losses_that_cannot_be_asked(engine, name):
    loss, says = LOSSES[name]
    with pytest.raises(InputError, match=says):
        federation(lambda: nn.Linear(FEATURES, CLASSES), engine, loss=loss)


def test_a_slower_way_is_told():
    with pytest.warns(EngineWarning, match="cannot be batched layer by layer.*using vmap") as told:
        made = federation(lambda: Centred(assign), "vector")
    assert [str(each.message) for each in told] == list(made.engine.notes)
    assert told[0].filename == __file__  # where the federation was made


@both_engines
def test_a_hook_may_keep_what_it_sees(engine):
    """Such a module cannot be copied once it has seen something."""

    def model():
        net = nn.Sequential(nn.Linear(FEATURES, 5), nn.ReLU(), nn.Linear(5, CLASSES))
        net.seen = []
        net[0].register_forward_hook(lambda module, given, out: net.seen.append(out))
        return net

    assert next(federation(model, engine, batch_size=BATCH).rounds(1)).losses.isfinite().all()
