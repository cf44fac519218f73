"""Norms are fused with a ReLU, or an addition and ReLU, if their output goes nowhere else."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedensemble import FedAvg, Federation
from fedensemble.engines.stacked import equivalence
from fedensemble.engines.stacked.equivalence import StackingReport, check_stackable
from fedensemble.engines.stacked.gradient import stacked_gradient
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
    "after a sum": (lambda net, h: F.relu(h + net.spare(net.kept)), "add_relu"),
    "as the second summand": (lambda net, h: torch.relu(torch.add(net.kept, h)), "add_relu"),
    "a summand by name": (
        lambda net, h: torch.relu(torch.add(input=h, other=net.kept)),
        "add_relu",
    ),
    "after a sum in place": (add_in_place, "add_relu"),
    "after a sum in place, unassigned": (unassigned, False),
    "all in place": (lambda net, h: nn.ReLU(inplace=True)(add_to(h, net.kept)), "add_relu"),
    "added to something": (lambda net, h: F.relu((net.kept + 0).add_(h)), False),
    "after a sum with weights": (lambda net, h: F.relu(torch.add(h, net.kept, alpha=2)), False),
    "after a sum of other shapes": (lambda net, h: F.relu(h + net.kept[:, :1]), False),
    "after a sum without a slope": (gate_sum, "add_relu"),
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
    functional_model = FunctionalModel(
        lambda: Net(between, norm), "cross_entropy", data.y[:1], dtype=torch.float64
    )
    found = check_stackable(functional_model, *pairs(data))
    fusions = {
        True: ("relu", ""),
        False: (),
        "add_relu": ("add_relu", ""),
        "two": ("add_relu", "", ""),
    }
    assert found[:2] == (None, fusions[expected])


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
    functional_model = FunctionalModel(
        lambda: Last(None), "cross_entropy", data.y[:1], dtype=torch.float64
    )
    assert check_stackable(functional_model, *pairs(data)) == StackingReport(None)


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
    functional_model = FunctionalModel(
        lambda: model(None), "cross_entropy", data.y[:1], dtype=torch.float64
    )
    gradient = stacked_gradient(functional_model, fusions=("relu", ""))
    x, y = data.x[:4].double().unsqueeze(0), data.y[:4].unsqueeze(0)
    given = (
        *functional_model.init_params(0, 1),
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
        functional_model = FunctionalModel(
            ModelSpec(model, {"hidden": hidden}), "cross_entropy", data.y[:1], dtype=torch.float64
        )
        built.clear()
        findings.append((check_stackable(functional_model, *pairs(data))[:2], len(built) > 0))
    assert findings == [
        ((None, ("relu",)), True),
        ((None, ("relu",)), False),
        ((None, ("relu",)), True),
    ]


def test_too_little_memory_is_no_finding(monkeypatch):
    data = classification()
    functional_model = FunctionalModel(
        ModelSpec(Net, {"between": CASES["F.relu"][0]}),
        "cross_entropy",
        data.y[:1],
        dtype=torch.float64,
    )

    def crowded(*given, **named):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(equivalence, "stacked_gradient", crowded)
        with pytest.raises(torch.OutOfMemoryError):
            check_stackable(functional_model, *pairs(data))
    assert check_stackable(functional_model, *pairs(data)).fusions == ("relu", "")


class Hooked(nn.Module):
    """Two fusable norms with a forward hook on the first, which keeps what it sees."""

    def __init__(self):
        super().__init__()
        self.inside, self.out = nn.Linear(FEATURES, 6), nn.Linear(6, CLASSES)
        self.first, self.second = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
        self.seen = []
        self.first.register_forward_hook(lambda module, args, out: self.seen.append((args[0], out)))

    def forward(self, x):
        hidden = self.inside(x)
        hidden = F.relu(self.first(hidden) + hidden)
        return self.out(F.relu(self.second(hidden)))


def test_a_forward_hook_sees_the_output_of_its_layer():
    """A fused pass would show it a placeholder, so a module with hooks is not fused."""
    data = classification()
    model = FunctionalModel(Hooked, "cross_entropy", data.y[:1], dtype=torch.float64)
    report = check_stackable(model, *pairs(data))
    assert report == StackingReport(None)
    x, y = pairs(data)
    module = model.training_model
    keys = torch.zeros(3, dtype=torch.int64)
    weight = torch.ones(3, 2, dtype=torch.bool)
    stacked_gradient(model, fusions=report.fusions)(*model.init_params(0, 3), x, y, weight, keys)
    for inputs, out in module.seen:
        split = inputs.reshape(3, 2, 6)
        expected = (split - split.mean(1, keepdim=True)) / torch.sqrt(
            split.var(1, keepdim=True, correction=0) + module.first.eps
        )
        torch.testing.assert_close(out.reshape(3, 2, 6), expected)
