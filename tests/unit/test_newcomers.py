"""What people try first: losses of their own, models that write into inputs, other data, wrong arguments."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedensemble import DataError, FedAvg, FederatedData, Federation, InputError

CLIENTS = [(torch.randn(6, 4, generator=torch.Generator().manual_seed(i)), torch.arange(6) % 3) for i in range(4)]
DATA = FederatedData.from_clients(CLIENTS)
NUMBERS = FederatedData.from_clients([(x, x.sum(1)) for x, _ in CLIENTS])


def linear():
    return nn.Linear(4, 3)


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(weight=torch.tensor([100.0, 1.0, 1.0])), nn.CrossEntropyLoss(reduction="sum")]
)
def test_losses_that_are_no_mean_over_examples_are_refused(loss):
    with pytest.raises(InputError, match="reduction='none'"):
        Federation(linear, DATA, loss=loss)


def test_weighted_losses_by_example_are_fine():
    loss = nn.CrossEntropyLoss(weight=torch.tensor([100.0, 1.0, 1.0]), reduction="none")
    weighted, plain = (Federation(linear, DATA, loss=chosen, modes=1) for chosen in (loss, "cross_entropy"))
    assert next(weighted.rounds(1)).loss > 5 * next(plain.rounds(1)).loss


def test_losses_that_broadcast_are_refused():
    with pytest.raises(InputError, match="broadcast"):
        Federation(lambda: nn.Linear(4, 1), NUMBERS, loss=lambda outputs, targets: (outputs - targets) ** 2)


def test_losses_that_return_no_tensor_are_refused():
    with pytest.raises(InputError, match="must return a tensor"):
        Federation(linear, DATA, loss=lambda outputs, targets: F.cross_entropy(outputs, targets).item())


class Greedy(nn.Module):
    """Writes into its inputs."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        x += 1
        return self.out(x)


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_a_model_that_writes_into_its_inputs_spoils_nothing(engine):
    before, x = DATA.x.clone(), torch.ones(2, 4)
    federation = Federation(Greedy, DATA, modes=2, engine=engine)
    next(federation.rounds(1))
    prediction = federation.ensemble.predict(x)
    assert torch.equal(DATA.x, before)
    assert torch.equal(x, torch.ones(2, 4))
    theta = federation.state.modes["theta"][1]
    expected = torch.softmax(F.linear(x + 1, theta[:12].reshape(3, 4), theta[12:]), -1)
    assert torch.allclose(prediction.members[1], expected, atol=1e-6)


class Undecided(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        return self.out(x if x.sum().item() > 0 else -x)


def test_models_that_cannot_be_batched_say_what_to_use():
    with pytest.raises(InputError, match="engine 'loop'"):
        Federation(Undecided, DATA, engine="vector")
    next(Federation(Undecided, DATA, engine="loop").rounds(1))


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_batch_norm_needs_two_values(engine):
    single = FederatedData.from_clients([(x[:1], y[:1]) for x, y in CLIENTS])
    with pytest.raises(InputError, match="BatchNorm"):
        Federation(lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), single, engine=engine)


def test_load_wants_the_same_data_and_settings(tmp_path):
    federation = Federation(linear, DATA, modes=2)
    next(federation.rounds(1))
    federation.save(tmp_path)
    with pytest.raises(InputError, match="4 clients with 24 examples"):
        Federation.load(tmp_path, model=linear, data=FederatedData.from_clients(CLIENTS[:3]))
    with pytest.raises(InputError, match="modes cannot change"):
        Federation.load(tmp_path, model=linear, data=DATA, modes=3)
    assert Federation.load(tmp_path, model=linear, data=DATA, engine="loop").round == 1


@pytest.mark.parametrize(
    "arguments",
    [
        {"modes": 2.5}, {"modes": "2"}, {"batch_size": "3"}, {"epochs": 1.5}, {"dtype": torch.float16},
        {"combine": "foo"}, {"combine": "outputs"},
    ],
)  # fmt: skip
def test_arguments_of_a_wrong_kind(arguments):
    with pytest.raises(InputError):
        Federation(linear, DATA, **arguments)


def test_other_arguments_of_a_wrong_kind():
    with pytest.raises(InputError, match="number for lr"):
        FedAvg(lr="0.1")
    with pytest.raises(InputError, match="FederatedData"):
        Federation(linear, CLIENTS)
    with pytest.raises(DataError, match="pair"):
        FederatedData.from_clients([1, 2])
    with pytest.raises(InputError, match="nan"):
        Federation(linear, DATA).ensemble.predict(torch.full((1, 4), torch.nan))


def test_reprs_are_short():
    assert repr(DATA) == "FederatedData(4 clients, 24 examples of (4,) float32, 3 classes, 0 to test)"
    assert repr(Federation(linear, DATA, modes=2)) == "Federation(fedavg, 2 modes, 4 clients, round 0)"


class Mistaken(nn.Module):
    """Fails only where it is batched over clients."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        if self.training:
            raise TypeError("a mistake of the model's own")
        return self.out(x)


def test_a_mistake_in_the_model_is_not_blamed_on_the_engine():
    with pytest.raises(TypeError, match="a mistake of the model's own"):
        Federation(Mistaken, DATA, engine="vector")
