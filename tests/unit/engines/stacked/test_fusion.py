"""Layers that may do what comes after them: those whose output goes there and nowhere else."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedensemble import FedAvg, FederatedData, Federation
from fedensemble.engines.stacked import equivalence
from fedensemble.engines.stacked.equivalence import check_stackable
from fedensemble.engines.stacked.gradient import folded_gradient
from fedensemble.errors import InputError
from fedensemble.modeling.factory import ModelSpec
from fedensemble.modeling.functional_model import FunctionalModel
from fedensemble.testing.assertions import require_close
from fedensemble.testing.toy_problems import CLASSES, FEATURES, classification


class Net(nn.Module):
    """Two norms, and what is done with the first one's output."""

    def __init__(self, between, norm=nn.BatchNorm1d):
        super().__init__()
        self.inside, self.out = nn.Linear(FEATURES, 6), nn.Linear(6, CLASSES)
        self.first, self.second = norm(6), nn.BatchNorm1d(CLASSES)
        self.spare, self.third = nn.Linear(6, 6), norm(6)
        self.between, self.passes = between, 0

    def forward(self, x):
        self.passes += 1
        self.kept = self.inside(x)
        h = self.between(self, self.first(self.kept))
        self.kept = None
        return self.second(self.out(h))


def both(net, h):
    return F.relu(h) + h


def listed(net, h):
    return torch.stack([F.relu(h), h]).sum(0)


def later(net, h):
    done = F.relu(h)
    return done * h.sum(1, keepdim=True)


def in_place_twice(net, h):
    done = F.relu(h, inplace=True)
    return done + h


def pairs(data):
    """Examples of three visits, two each."""
    return data.x[:6].double().reshape(3, 2, -1), data.y[:6].reshape(3, 2)


def add_to(h, other):
    h += other
    return h


def add_in_place(net, h):
    return F.relu(add_to(h, net.kept))


def unassigned(net, h):
    h.add_(net.kept)
    torch.relu_(h)
    return h


def sum_twice(net, h):
    both = h + net.kept
    return F.relu(both) + both


def gate_sum(net, h):
    with torch.no_grad():
        opened = F.relu(h + net.kept)
    return torch.tanh(net.spare(opened + 1))


def gate(net, h):
    with torch.no_grad():
        opened = F.relu(h)
    return torch.tanh(net.spare(opened + 1))


CASES = {
    "F.relu": (lambda net, h: F.relu(h), True),
    "torch.relu": (lambda net, h: torch.relu(h), True),
    "a method": (lambda net, h: h.relu(), True),
    "nn.ReLU": (lambda net, h: nn.ReLU()(h), True),
    "in place": (lambda net, h: nn.ReLU(inplace=True)(h), True),
    "in place, and itself": (in_place_twice, True),
    "relu_": (lambda net, h: torch.relu_(h), True),
    "by name": (lambda net, h: torch.relu(input=h), True),
    "without a slope": (gate, False),
    "something else": (lambda net, h: torch.tanh(h), False),
    "after a sum with a number": (lambda net, h: F.relu(h + 1), False),
    "after a sum": (lambda net, h: F.relu(h + net.spare(net.kept)), "sum"),
    "as the second summand": (lambda net, h: torch.relu(torch.add(net.kept, h)), "sum"),
    "a summand by name": (lambda net, h: torch.relu(torch.add(input=h, other=net.kept)), "sum"),
    "after a sum in place": (add_in_place, "sum"),
    "after a sum in place, unassigned": (unassigned, False),
    "all in place": (lambda net, h: nn.ReLU(inplace=True)(add_to(h, net.kept)), "sum"),
    "added to something": (lambda net, h: F.relu((net.kept + 0).add_(h)), False),
    "after a sum with weights": (lambda net, h: F.relu(torch.add(h, net.kept, alpha=2)), False),
    "after a sum of other shapes": (lambda net, h: F.relu(h + net.kept[:, :1]), False),
    "after a sum without a slope": (gate_sum, "sum"),
    "a sum with itself": (lambda net, h: F.relu(h + h), False),
    "a sum that is used twice": (sum_twice, False),
    "a sum and itself": (lambda net, h: F.relu(h + net.kept) + h, False),
    "two norms in a sum": (lambda net, h: F.relu(h + net.third(net.kept)), "two"),
    "both": (both, False),
    "in a list": (listed, False),
    "later": (later, False),
    "twice": (lambda net, h: F.relu(h) + F.relu(h), False),
    "unused": (lambda net, h: h, False),
}


def grouped(channels):
    return nn.GroupNorm(2, channels)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, grouped])
@pytest.mark.parametrize("case", CASES)
def test_which_are_found(case, norm):
    between, expected = CASES[case]
    data = classification()
    learner = FunctionalModel(
        lambda: Net(between, norm), "cross_entropy", data.y[:1], dtype=torch.float64
    )
    found = check_stackable(learner, *pairs(data))
    fates = {True: ("relu", ""), False: (), "sum": ("sum", ""), "two": ("sum", "", "")}
    assert found == (None, fates[expected])


@pytest.mark.parametrize(
    ("case", "norm"),
    [(case, nn.BatchNorm1d) for case in CASES]
    + [
        (case, grouped)
        for case in (
            "F.relu",
            "in place",
            "after a sum",
            "all in place",
            "two norms in a sum",
            "both",
        )
    ],
)
def test_engines_agree(case, norm):
    runs = {}
    for engine in ("loop", "vector"):
        runs[engine] = Federation(
            lambda: Net(CASES[case][0], norm),
            classification(),
            FedAvg(lr=0.1),
            modes=2,
            batch_size=4,
            engine=engine,
            dtype=torch.float64,
        )
        list(runs[engine].rounds(2))
    assert not runs["vector"].engine.notes
    got, expected = (
        {**run.state.modes, "buffers": run.state.buffers} for run in (runs["vector"], runs["loop"])
    )
    require_close(got, expected, f"Engines disagree on {case}")


class Images(nn.Module):
    """A convolution, and what is done with its output."""

    def __init__(self, between):
        super().__init__()
        self.first, self.second, self.out = nn.Conv2d(1, 3, 3), nn.Conv2d(3, 3, 1), nn.Linear(27, 3)
        self.between = between

    def forward(self, x):
        self.given = x
        return self.out(self.between(self, self.first(x)).flatten(1)[:, :27])


class Halved(torch.autograd.Function):
    """A function that torch's modes do not see."""

    @staticmethod
    def forward(ctx, x):
        return x / 2

    @staticmethod
    def backward(ctx, slope):
        return slope / 2


def unseen(net, h):
    return F.max_pool2d(h, 2) + Halved.apply(h)[..., :3, :3]


def no_slope(net, h):
    with torch.no_grad():
        return net.first(net.given)


def pooled(x, size=2, **other):
    return F.max_pool2d(x, size, **other)


POOLED = {
    "pooled": (lambda net, h: pooled(h), ("pool",)),
    "a module": (lambda net, h: nn.MaxPool2d(2, 2)(h), ("pool",)),
    "by name": (lambda net, h: F.max_pool2d(input=h, kernel_size=2), ("pool",)),
    "after a ReLU": (lambda net, h: pooled(h.relu()), ("pool",)),
    "after a ReLU in place": (lambda net, h: nn.MaxPool2d(2)(nn.ReLU(inplace=True)(h)), ("pool",)),
    "after a ReLU in place, unassigned": (lambda net, h: (h.relu_(), pooled(h))[1], ("pool",)),
    "before a ReLU": (lambda net, h: F.relu(pooled(h)), ("pool",)),
    "after two ReLUs": (lambda net, h: pooled(h.relu().relu()), ()),
    "two in a row": (lambda net, h: pooled(net.second(pooled(h)), 1), ("pool", "pool")),
    "with steps": (lambda net, h: pooled(h, stride=1), ()),
    "with edges": (lambda net, h: pooled(h, padding=1), ()),
    "with parts of squares": (lambda net, h: pooled(h, 4, ceil_mode=True).repeat(1, 3, 1, 1), ()),
    "without parts of squares": (lambda net, h: pooled(h, 4).repeat(1, 9, 1, 1), ("pool",)),
    "of other sides": (lambda net, h: pooled(h, (2, 1)), ()),
    "without a slope": (lambda net, h: pooled(no_slope(net, h)) + h[..., :3, :3], ()),
    "twice": (lambda net, h: pooled(h) + pooled(h), ()),
    "and added": (lambda net, h: pooled(h) + h[..., :3, :3], ()),
    "and the ReLU added": (lambda net, h: pooled(r := h.relu()) + r[..., :3, :3], ()),
    "and the ReLU in place added": (lambda net, h: pooled(h.relu_()) + h[..., :3, :3], ()),
    "by its mean": (lambda net, h: F.avg_pool2d(h, 2), ()),
    "after dropout": (lambda net, h: pooled(F.dropout2d(h, 0.5)), ()),
    "asked for its shape": (lambda net, h: pooled(h[: h.shape[0]]), ()),
    "unseen": (unseen, ()),
}


def images():
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(6, 1, 8, 8, generator=generator), torch.arange(6) % 3) for _ in range(4)]
    return FederatedData.from_clients(data)


@pytest.mark.parametrize("case", POOLED)
def test_which_convolutions_are_found(case):
    between, expected = POOLED[case]
    data = images()
    learner = FunctionalModel(
        lambda: Images(between), "cross_entropy", data.y[:1], dtype=torch.float64
    )
    x, y = data.x[:6].double().reshape(3, 2, 1, 8, 8), data.y[:6].reshape(3, 2)
    assert check_stackable(learner, x, y) == (None, expected)


@pytest.mark.parametrize("case", POOLED)
def test_engines_agree_on_pooled_convolutions(case):
    runs = {}
    for engine in ("loop", "vector"):
        runs[engine] = Federation(
            lambda: Images(POOLED[case][0]),
            images(),
            FedAvg(lr=0.1),
            modes=2,
            batch_size=3,
            engine=engine,
            dtype=torch.float64,
        )
        list(runs[engine].rounds(2))
    assert not runs["vector"].engine.notes
    require_close(
        runs["vector"].state.modes, runs["loop"].state.modes, f"Engines disagree on {case}"
    )


def test_images_that_are_written_over_before_they_are_pooled():
    """With a frozen convolution nothing else would notice; here the change is one that no trial
    sees.
    """

    class Clipped(Images):
        def __init__(self):
            super().__init__(lambda net, h: (net.given.clamp_(-9, 9), pooled(h))[1])
            self.first.requires_grad_(False)

    data = images()
    run = Federation(Clipped, data, FedAvg(lr=0.1), modes=1, engine="vector", dtype=torch.float64)
    assert run.engine.fates == ()


@pytest.mark.parametrize(
    "other",
    [
        torch.tanh,
        lambda h: F.avg_pool2d(h, 2),
        lambda h: F.max_pool2d(h, 2, 1),
        F.relu,
        lambda h: torch.zeros(4, 27),
    ],
)
def test_a_pooling_that_does_not_come_is_noticed(other):
    data = images()
    learner = FunctionalModel(
        lambda: Images(lambda net, h: other(h)), "cross_entropy", data.y[:1], dtype=torch.float64
    )
    given = (*learner.initial(0, 1), data.x[:4].double()[None], data.y[:4][None])
    rest = (torch.ones(1, 4, dtype=torch.bool), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(InputError, match="use engine 'loop'"):
        folded_gradient(learner, fates=("pool",))(*given, *rest)


def test_an_output_is_not_rectified():
    """The last BatchNorm's output goes to a ReLU whose result is thrown away, and is the module's
    output.
    """

    class Last(Net):
        def forward(self, x):
            h = self.first(self.inside(x))
            F.relu(h)
            return h

    data = classification()
    learner = FunctionalModel(lambda: Last(None), "cross_entropy", data.y[:1], dtype=torch.float64)
    assert check_stackable(learner, *pairs(data)) == (None, ())


class Fickle(Net):
    """After three passes a ReLU does not come."""

    def forward(self, x):
        self.passes += 1
        h = self.first(self.inside(x))
        return self.second(self.out(F.relu(h) if self.passes <= 3 else h))


class Growing(Net):
    """After three passes there is a BatchNorm more, before the others, so that their numbers
    change.
    """

    def __init__(self, between):
        super().__init__(between)
        self.third = nn.BatchNorm1d(6)

    def forward(self, x):
        self.passes += 1
        h = self.inside(x)
        if self.passes > 3:
            h = self.third(h)
            h = h + F.relu(h)
        return self.second(self.out(F.relu(self.first(h))))


@pytest.mark.parametrize("model", [Fickle, Growing])
def test_other_ways_than_on_trial_are_noticed(model):
    data = classification()
    learner = FunctionalModel(lambda: model(None), "cross_entropy", data.y[:1], dtype=torch.float64)
    gradient = folded_gradient(learner, fates=("relu", ""))
    x, y = data.x[:4].double().unsqueeze(0), data.y[:4].unsqueeze(0)
    given = (
        *learner.initial(0, 1),
        x,
        y,
        torch.ones(1, 4, dtype=torch.bool),
        torch.zeros(1, dtype=torch.int64),
    )
    for _ in range(3):
        gradient(*given)
    with pytest.raises(InputError, match="use engine 'loop'"):
        gradient(*given)


def test_a_recipe_is_tried_once():
    built = []

    def model(hidden):
        built.append(hidden)
        return nn.Sequential(
            nn.Linear(FEATURES, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, CLASSES),
        )

    data = classification()
    findings = []
    for hidden in (5, 5, 6):
        learner = FunctionalModel(
            ModelSpec(model, {"hidden": hidden}), "cross_entropy", data.y[:1], dtype=torch.float64
        )
        built.clear()
        findings.append((check_stackable(learner, *pairs(data)), len(built) > 0))
    assert findings == [
        ((None, ("relu",)), True),
        ((None, ("relu",)), False),
        ((None, ("relu",)), True),
    ]


def test_too_little_memory_is_no_finding(monkeypatch):
    data = classification()
    learner = FunctionalModel(
        ModelSpec(Net, {"between": CASES["F.relu"][0]}),
        "cross_entropy",
        data.y[:1],
        dtype=torch.float64,
    )

    def crowded(*given, **named):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(equivalence, "folded_gradient", crowded)
        with pytest.raises(torch.OutOfMemoryError):
            check_stackable(learner, *pairs(data))
    assert check_stackable(learner, *pairs(data)) == (None, ("relu", ""))
