"""Common mistakes: custom losses, models that write into inputs, other data, wrong arguments."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedensemble as fe
from fedensemble import (
    Balanced,
    DataError,
    Devices,
    Everybody,
    FedAvg,
    FederatedData,
    Federation,
    FedProx,
    InputError,
)
from fedensemble.metrics import evaluate, evaluate_modes
from fedensemble.testing import check_algorithm

CLIENTS = [
    (torch.randn(6, 4, generator=torch.Generator().manual_seed(i)), torch.arange(6) % 3)
    for i in range(4)
]
DATA = FederatedData.from_clients(CLIENTS)
NUMBERS = FederatedData.from_clients([(x, x.sum(1)) for x, _ in CLIENTS])


def linear():
    return nn.Linear(4, 3)


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(weight=torch.tensor([100.0, 1.0, 1.0])),
        nn.CrossEntropyLoss(reduction="sum"),
    ],
)
def test_losses_that_are_not_a_mean_over_examples_are_rejected(loss):
    with pytest.raises(InputError, match="reduction='none'"):
        Federation(linear, DATA, loss=loss)


def test_weighted_losses_by_example_are_fine():
    loss = nn.CrossEntropyLoss(weight=torch.tensor([100.0, 1.0, 1.0]), reduction="none")
    weighted, plain = (
        Federation(linear, DATA, loss=chosen, modes=1) for chosen in (loss, "cross_entropy")
    )
    assert next(weighted.rounds(1)).loss > 5 * next(plain.rounds(1)).loss


def test_losses_that_broadcast_are_rejected():
    with pytest.raises(InputError, match="broadcast"):
        Federation(
            lambda: nn.Linear(4, 1), NUMBERS, loss=lambda outputs, targets: (outputs - targets) ** 2
        )


def test_losses_that_return_no_tensor_are_rejected():
    with pytest.raises(InputError, match="must return a tensor"):
        Federation(
            linear, DATA, loss=lambda outputs, targets: F.cross_entropy(outputs, targets).item()
        )


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


def normed():
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_batch_norm_needs_two_values(engine):
    single = FederatedData.from_clients([(x[:1], y[:1]) for x, y in CLIENTS])
    for batch in (1, 3):
        with pytest.raises(
            InputError,
            match=r"batches of 1: .* No client has more than 1 example: use GroupNorm",
        ):
            Federation(normed, single, engine=engine, batch_size=batch)
    with pytest.raises(InputError, match=r"batches of 1: .* Raise batch_size\."):
        Federation(normed, DATA, engine=engine, batch_size=1)


@pytest.mark.parametrize("engine", ["loop", "vector"])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # torch's own
def test_scripted_modules_are_rejected(engine):
    for made in (
        lambda: torch.jit.script(linear()),
        lambda: torch.jit.trace(linear(), torch.zeros(2, 4)),
    ):
        with pytest.raises(
            InputError, match=r"returned a scripted module.*Return the plain nn.Module"
        ):
            Federation(made, DATA, engine=engine)


def test_load_needs_the_same_data_and_settings(tmp_path):
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
        {"modes": 2.5},
        {"modes": "2"},
        {"batch_size": "3"},
        {"epochs": 1.5},
        {"dtype": torch.float16},
        {"combine": "foo"},
        {"combine": "outputs"},
    ],
)
def test_arguments_of_a_wrong_type(arguments):
    with pytest.raises(InputError):
        Federation(linear, DATA, **arguments)


def test_other_arguments_of_a_wrong_type():
    with pytest.raises(InputError, match="number for lr"):
        FedAvg(lr="0.1")
    with pytest.raises(InputError, match="FederatedData"):
        Federation(linear, CLIENTS)
    with pytest.raises(DataError, match="pair"):
        FederatedData.from_clients([1, 2])
    with pytest.raises(InputError, match="nan"):
        Federation(linear, DATA).ensemble.predict(torch.full((1, 4), torch.nan))


@pytest.mark.parametrize(
    ("name", "argument", "got"),
    [
        ("algorithm", FedProx, r"the class FedProx; write FedProx\(lr=\.\.\.\)"),
        ("algorithm", 3, "int"),
        ("schedule", Balanced, r"the class Balanced; write Balanced\(modes=\.\.\.\)"),
        ("schedule", 3, "int"),
        ("participation", Devices, r"the class Devices; write Devices\(\w+=\.\.\.\)"),
        ("participation", Everybody, r"the class Everybody; write Everybody\(\w+=\.\.\.\)"),
    ],
)
def test_classes_instead_of_instances(name, argument, got):
    with pytest.raises(InputError, match=f"{name} must be .* got {got}\\."):
        Federation(linear, DATA, **{name: argument})


def test_reprs_are_short():
    assert (
        repr(DATA) == "FederatedData(4 clients, 24 examples of (4,) float32, 3 classes, 0 to test)"
    )
    assert (
        repr(Federation(linear, DATA, modes=2)) == "Federation(fedavg, 2 modes, 4 clients, round 0)"
    )


class Mistaken(nn.Module):
    """Fails only in training."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        if self.training:
            raise TypeError("a mistake of the model's own")
        return self.out(x)


def test_a_mistake_in_the_model_is_not_blamed_on_the_engine():
    with pytest.raises(
        InputError, match=r"cannot be trained .* a mistake of the model's own"
    ) as raised:
        Federation(Mistaken, DATA, engine="vector")
    assert isinstance(raised.value.__cause__, TypeError)


def test_a_model_that_is_always_the_same_object_is_rejected():
    net = linear()
    with pytest.raises(InputError, match="returned the same"):
        Federation(lambda: net, DATA, modes=1)


@pytest.mark.parametrize("count", ["3", -1, 2.5])
def test_rounds_needs_an_integer(count):
    federation = Federation(linear, DATA)
    with pytest.raises(InputError, match="integer"):
        federation.rounds(count)
    assert list(federation.rounds(0)) == []


@pytest.mark.parametrize("name", ["modes", "strata", "clients_per_round"])
def test_arguments_of_the_schedule_must_be_integers(name):
    for value in ("5", 2.5, True):
        with pytest.raises(InputError, match=f"needs an integer for {name}; got {value!r}"):
            Federation(linear, DATA, **{name: value})


def test_predict_takes_integers():
    ensemble, x = Federation(linear, DATA, modes=2).ensemble, torch.arange(8).reshape(2, 4)
    for inputs in (x, x.to(torch.uint8), x.tolist()):
        assert torch.equal(ensemble.predict(inputs).mean, ensemble.predict(x.float()).mean)
    with pytest.raises(InputError, match="first in row 1"):
        ensemble.predict([[0.0] * 4, [float("nan")] * 4])


class Reader(nn.Module):
    """Embeds tokens."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 3)

    def forward(self, x):
        return self.table(x).mean(1)


def test_tokens_stay_integers():
    tokens = FederatedData.from_clients([(torch.arange(12).reshape(3, 4) % 9, [0, 1, 2])])
    ensemble = Federation(Reader, tokens, modes=2).ensemble
    assert ensemble.predict(tokens.x).mean.shape == (3, 3)
    with pytest.raises(InputError, match="trained on integers"):
        ensemble.predict(tokens.x.float())
    with pytest.raises(InputError, match="embeds tokens"):
        Federation(Reader, DATA)
    with pytest.raises(InputError, match="Give x as floats"):
        Federation(linear, tokens)


def test_evaluate_needs_a_target_for_each_row():
    prediction = Federation(linear, DATA).ensemble.predict(DATA.x)
    for judge in (evaluate, evaluate_modes):
        with pytest.raises(
            InputError, match=r"for 24 rows and needs targets of shape \(24,\); got \(10,\)"
        ):
            judge(prediction, DATA.y[:10])
        assert (
            judge(prediction, DATA.y.tolist())
            == judge(prediction, DATA.y.unsqueeze(1))
            == judge(prediction, DATA.y)
        )
    numbers = Federation(lambda: nn.Linear(4, 1), NUMBERS, loss="mse").ensemble.predict(NUMBERS.x)
    with pytest.raises(InputError, match="24 rows"):
        evaluate(numbers, NUMBERS.y[:10])


def test_clients_may_come_from_a_generator():
    assert torch.equal(FederatedData.from_clients(client for client in CLIENTS).x, DATA.x)
    with pytest.raises(DataError, match="no clients"):
        FederatedData.from_clients(iter(()))
    with pytest.raises(DataError, match="a list of pairs"):
        FederatedData.from_clients(3)


class Forgetful(FedAvg):
    """Returns one dictionary instead of two."""

    def local_training(self, sent, memory, problem):
        return super().local_training(sent, memory, problem)[0]


class Bare(FedAvg):
    """Returns tensors without names."""

    def local_training(self, sent, memory, problem):
        return super().local_training(sent, memory, problem)[0]["theta"], {}


@pytest.mark.parametrize(
    ("method", "got"), [(Forgetful(), "got dict"), (Bare(), "got Tensor, dict")]
)
def test_local_training_that_returns_no_pair(method, got):
    for attempt in (lambda: Federation(linear, DATA, method), lambda: check_algorithm(method)):
        with pytest.raises(
            InputError, match=f"local_training must return two dictionaries .* {got}"
        ):
            attempt()


def test_the_battery_says_what_it_checked():
    held = check_algorithm(FedAvg(lr=0.1), "loop")
    assert (
        held[0] == "arithmetic"
        and len(held) == 8
        and all("engine 'loop'" in each for each in held[1:])
    )


def test_load_names_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(fe.StoreError, match=r"There is no folder .*nowhere\. Give the folder that"):
        fe.Federation.load(tmp_path / "nowhere")
    with pytest.raises(fe.StoreError, match="There is no federation in"):
        fe.Federation.load(tmp_path)


def test_a_model_that_does_not_fit_is_the_mistake_of_the_argument(tmp_path):
    data = fe.FederatedData.from_clients(
        [(torch.randn(4, 3), torch.tensor([0, 1, 0, 1])) for _ in range(4)]
    )
    federation = fe.Federation(lambda: nn.Linear(3, 2), data, modes=2, clients_per_round=4)
    federation.train(1)
    assert repr(federation.history) == "History(1 records, 0 with a test)"
    folder = federation.save(tmp_path / "run")
    with pytest.raises(fe.InputError) as error:
        fe.load_ensemble(folder, model=lambda: nn.Sequential(nn.Linear(3, 2)))
    assert "does not fit the model that was passed" in str(error.value)
    assert "Pass the model that the run was trained with." in str(error.value)
    assert "Delete" not in str(error.value)
