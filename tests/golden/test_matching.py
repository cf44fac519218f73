"""PFNM and FedMA: units in another order are found again, layers grow, and what cannot be matched
is refused.
"""

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from torch import nn

from fedensemble import SGD, Adam, FederatedData, Federation, InputError, Stratified
from fedensemble.algorithms import PFNM, FedAvg, FedMA
from fedensemble.algorithms.matching.assignment import Prior, match_units
from fedensemble.algorithms.matching.unit_permutation import find_structure
from fedensemble.core.types import Cohort, GatheredUploads
from fedensemble.modeling.functional_model import FunctionalModel
from fedensemble.modeling.server_context import ServerContext
from fedensemble.models import CNN, LSTM, MLP
from fedensemble.testing import check_algorithm
from fedensemble.testing.toy_problems import (
    classification,
    labels,
    numbers,
    small_federation,
    train,
)

CLOSE = 1e-10  # float64, a few sums
CLIENTS = 5

MODELS = {
    "MLP": (lambda: MLP((6,), 3, hidden=(8, 7, 5)), lambda: numbers(9, 6)),
    "CNN": (lambda: CNN((1, 16, 16), 3), lambda: numbers(9, 1, 16, 16)),
    "LSTM": (lambda: LSTM(5, embedding=3, hidden=6), lambda: labels(9, 4, classes=5)),
    "GRU": (lambda: Sequence(nn.GRU), lambda: numbers(9, 4, 3)),
}
METHODS = [PFNM(), FedMA(), FedMA(freeze=False)]


class Sequence(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layers, self.out = kind(3, 6, 1, batch_first=True), nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.layers(x)[0])


def make(model, x):
    functional_model = FunctionalModel(
        model, "cross_entropy", torch.zeros(1, dtype=torch.int64), dtype=torch.float64
    )
    return functional_model, ServerContext(functional_model, x)


def shuffled(structure, theta, copies):
    """Copies of a network, each with its units in an order of its own."""
    random = torch.Generator().manual_seed(3)
    slot = torch.stack(
        [
            torch.cat(
                [
                    units.first + torch.randperm(units.width, generator=random)
                    for units in structure.layers
                ]
            )
            for _ in range(copies)
        ]
    )
    return structure.reorder(theta.repeat(copies, 1), slot)


def merged(method, thetas, weight=None):
    weight = torch.ones(len(thetas), dtype=torch.float64) if weight is None else weight
    zero = torch.zeros(len(thetas), dtype=torch.int64)
    members = GatheredUploads(
        torch.arange(len(thetas)), zero, weight, {"theta": thetas}, torch.empty(len(thetas), 0)
    )
    one = torch.ones(1, 1, dtype=torch.float64)
    mean = (weight / weight.sum()) @ thetas
    state = method.init_mode(mean[None])
    return method.server_update(
        state, {"theta": mean[None]}, Cohort(one, one, one, 9, 0.3 * one, members)
    )["theta"][0]


@pytest.mark.parametrize(
    "method", METHODS, ids=lambda method: repr(method)[:5] + str(getattr(method, "freeze", ""))
)
@pytest.mark.parametrize("name", MODELS)
def test_the_original_network_is_found_again(name, method):
    model, inputs = MODELS[name]
    functional_model, context = make(model, inputs())
    bound = method.bind(context)
    theta, buffers = (tensor[0] for tensor in functional_model.init_params(1, 1))
    copies = shuffled(bound.structure, theta, CLIENTS)

    def outputs(weights):
        return functional_model.outputs(weights, buffers, inputs())

    for copy in copies:
        torch.testing.assert_close(outputs(copy), outputs(theta), rtol=0, atol=CLOSE)
    torch.testing.assert_close(outputs(merged(bound, copies)), outputs(theta), rtol=0, atol=CLOSE)
    # in the first client's order
    torch.testing.assert_close(merged(bound, copies), copies[0], rtol=0, atol=CLOSE)
    plain = (outputs(copies.mean(0)) - outputs(theta)).abs().max()
    assert float(plain) > 100 * CLOSE


@pytest.mark.parametrize("method", [PFNM(), FedMA()], ids=["pfnm", "fedma"])
def test_noisy_copies_are_matched_and_averaged_by_weight(method):
    functional_model, context = make(*(f if i == 0 else f() for i, f in enumerate(MODELS["MLP"])))
    bound = method.bind(context)
    theta = functional_model.init_params(1, 1)[0]
    noisy = theta + 0.01 * numbers(3, theta.shape[1])
    slot = torch.arange(bound.structure.units).repeat(3, 1)
    for units in bound.structure.layers:
        slot[2, units.all] = slot[2, units.all].flip(0)
    weight = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    expected = (weight / weight.sum()) @ noisy
    found = merged(bound, bound.structure.reorder(noisy, slot), weight)
    torch.testing.assert_close(found, expected, rtol=0, atol=CLOSE)


def test_assignment_is_the_best_of_all_permutations():
    """Two clients, so that one matching is the whole problem: the posterior of every assignment, by
    brute force.
    """
    width, prior = 4, Prior(sigma=0.7, sigma0=2.0, gamma=1.0)
    vectors = numbers(2, width, 3)
    found = match_units(
        vectors, torch.ones(2, width, dtype=torch.bool), torch.ones(2), prior, sweeps=2
    )

    def posterior(order):
        """Log density of pairs (v, w): both from one unit, whose mean is integrated out, up to what
        all share.
        """
        pairs = [(vectors[0, order[unit]], vectors[1, unit]) for unit in range(width)]
        s, s0 = prior.sigma**2, prior.sigma0**2
        return sum(float((((a + b) / s) ** 2).sum()) / (1 / s0 + 2 / s) for a, b in pairs)

    best = max(permutations(range(width)), key=posterior)
    assert found[0].tolist() == list(range(width))
    assert found[1].tolist() == list(best)


def test_gain_of_a_new_unit_by_hand():
    """One unit each, far apart: they stay apart exactly if the formula says that a new unit gains
    more.
    """
    sigma, sigma0, gamma = 0.5, 1.5, 0.8
    a, b = np.array([1.0, 0.0]), np.array([-1.0, 0.4])
    s, s0 = sigma**2, sigma0**2
    joined = (
        (((a + b) / s) ** 2).sum() / (1 / s0 + 2 / s)
        - ((a / s) ** 2).sum() / (1 / s0 + 1 / s)
        + 2 * math.log(1)
    )
    alone = ((b / s) ** 2).sum() / (1 / s0 + 1 / s) + 2 * math.log(gamma / 2)
    assert alone > joined
    tight = gamma * math.exp((joined - alone) / 2)  # at this gamma both gain alike
    vectors = torch.zeros(2, 2, 2, dtype=torch.float64)
    vectors[0, 0], vectors[1, 0] = torch.as_tensor(a), torch.as_tensor(b)
    used = torch.tensor([[True, False]] * 2)
    for factor, expected in ((1.01, 1), (0.99, 0)):
        prior = Prior(sigma, sigma0, tight * factor)
        assert int(match_units(vectors, used, torch.ones(2), prior, sweeps=1)[1, 0]) == expected


def test_units_that_many_have_are_preferred():
    """Two clients share a unit; a third, a little off, joins them exactly if the formula with n =
    2, J = 3 says so.
    """
    sigma, sigma0 = 0.5, 1.5
    a, b = np.array([1.0, 0.0]), np.array([0.2, 0.7])
    s, s0 = sigma**2, sigma0**2
    joined = (((2 * a + b) / s) ** 2).sum() / (1 / s0 + 3 / s) - ((2 * a / s) ** 2).sum() / (
        1 / s0 + 2 / s
    )
    joined += 2 * math.log(2 / (3 - 2))
    alone = ((b / s) ** 2).sum() / (1 / s0 + 1 / s)
    # the gamma at which both gain alike: 2 log(gamma / 3) is added alone
    even = 3 * math.exp((joined - alone) / 2)
    vectors = torch.zeros(3, 2, 2, dtype=torch.float64)
    vectors[:, 0] = torch.as_tensor(np.stack([a, a, b]))
    used = torch.tensor([[True, False]] * 3)
    for factor, expected in ((1.01, 1), (0.99, 0)):
        prior = Prior(sigma, sigma0, even * factor)
        assert int(match_units(vectors, used, torch.ones(3), prior, sweeps=0)[2, 0]) == expected


@pytest.mark.parametrize("kind", [PFNM, FedMA])
def test_a_layer_grows_to_the_models_width_and_no_further(kind):
    functional_model, context = make(lambda: MLP((6,), 3, hidden=(6,)), numbers(9, 6))
    method = kind(start=0.5, sigma=0.01, gamma=100.0).bind(context)
    start = method.init_mode(functional_model.init_params(0, 3)[0])["theta"]
    assert method.structure.used_units(start).sum(1).tolist() == [3, 3, 3]
    # unlike networks share no units while there is room
    for count, width in ((1, 3), (2, 6), (3, 6)):
        grown = merged(method, start[:count])
        assert int(method.structure.used_units(grown).sum()) == width
    buffers = torch.empty(0, dtype=torch.float64)
    x = numbers(9, 6)
    # has every unit of either with its own weights; only the output bias is shared
    both = merged(method, start[:2])
    bias = functional_model.theta_layout.unflatten(start)["layers.3.bias"]

    def hidden(theta, own):
        return functional_model.outputs(theta, buffers, x) - own

    expected = hidden(start[0], bias[0]) + hidden(start[1], bias[1])
    torch.testing.assert_close(hidden(both, bias[:2].mean(0)), expected, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("engine", ["loop", "vector"])
@pytest.mark.parametrize(
    ("model", "data"),
    [
        (lambda: MLP((4,), 3, hidden=(8, 6)), classification),
        (
            lambda: Sequence(nn.LSTM),
            lambda: FederatedData.from_arrays(numbers(12, 4, 3), labels(12, 4), [7, 5]),
        ),
    ],
    ids=["ReLU", "LSTM"],
)
def test_unused_units_stay_at_zero_in_local_training(model, data, engine):
    federation = Federation(
        model,
        data(),
        PFNM(start=0.5, lr=0.5),
        engine=engine,
        modes=2,
        strata=2,
        dtype=torch.float64,
        batch_size=3,
    )
    structure = federation.algorithm.structure
    state = federation.state
    request = federation.next_request()
    returned = federation.engine.run_visits(*request)
    uploads = returned.cohort.members.uploads["theta"]
    used = structure.used_units(state.modes["theta"])[returned.cohort.members.mode]
    assert bool((uploads[~structure.used_weights(used)] == 0).all())
    assert torch.equal(structure.used_units(uploads), used)
    train(federation, 2)
    assert bool(structure.used_units(federation.state.modes["theta"]).any())


@pytest.mark.parametrize(
    "method", [PFNM(start=0.5), FedMA(start=0.5), FedMA(freeze=False)], ids=repr
)
def test_contract_with_room_to_grow(method):
    check_algorithm(method, "vector")


def test_one_client_is_fedavg():
    data = FederatedData.from_arrays(numbers(9, 4), labels(9), [9])
    runs = [
        train(
            Federation(lambda: MLP((4,), 3), data, method, modes=1, dtype=torch.float64), 3
        ).state.modes["theta"]
        for method in (FedAvg(), PFNM(own_rounds=0), FedMA(freeze=False, own_rounds=0))
    ]
    torch.testing.assert_close(runs[1], runs[0], rtol=0, atol=CLOSE)
    torch.testing.assert_close(runs[2], runs[0], rtol=0, atol=CLOSE)


def test_fedma_freezes_what_it_has_matched_and_starts_again():
    method = FedMA(lr=0.3, optimizer=SGD(weight_decay=0.1))
    data = classification()
    federation = Federation(
        lambda: MLP((4,), 3, hidden=(5, 5)),
        data,
        method,
        dtype=torch.float64,
        schedule=Stratified(modes=1, strata=1, clients_per_round=6),
    )
    stage = federation.algorithm.structure.stage
    for frozen in (0, 1, 2, 0, 1):
        assert federation.state.modes["frozen"].item() == frozen
        before = federation.state.modes["theta"]
        train(federation, 1)
        # sums of equal numbers cost a digit
        moved = (federation.state.modes["theta"] - before).abs()[0] > 1e-12
        assert not bool(moved[stage < frozen].any())
        assert all(bool(moved[stage == layer].any()) for layer in range(frozen, 3))


@pytest.mark.parametrize(
    "optimizer", [SGD(weight_decay=0.5), Adam(weight_decay=0.5)], ids=["sgd", "adam"]
)
def test_what_is_frozen_stands_still_while_the_rest_trains(optimizer):
    def fixed():
        model = MLP((4,), 3, hidden=(5,))
        next(module for module in model.modules() if isinstance(module, nn.Linear)).requires_grad_(
            False
        )
        return model

    data = FederatedData.from_arrays(numbers(9, 4), labels(9), [9])
    options = {"modes": 1, "batch_size": 3, "dtype": torch.float64}
    matched = Federation(
        lambda: MLP((4,), 3, hidden=(5,)),
        data,
        FedMA(lr=0.1, optimizer=optimizer, own_rounds=0),
        **options,
    )
    matched.state.modes["frozen"].fill_(1)
    plain = Federation(fixed, data, FedAvg(lr=0.1, optimizer=optimizer), **options)
    trained = matched.algorithm.structure.stage >= 1
    got = train(matched, 1).state.modes["theta"][:, trained]
    torch.testing.assert_close(got, train(plain, 1).state.modes["theta"], rtol=0, atol=CLOSE)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        hidden = torch.relu(self.first(x))
        return self.out(hidden + torch.relu(self.second(hidden)))


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.out = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.out(self.middle(torch.relu(self.middle(self.first(x)))))


def frozen_model():
    model = MLP((4,), 3, hidden=(5,))
    next(model.parameters()).requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Residual, "layer 'first'.*residual connection"),
        (Shared, "layer 'middle' .*used more than once"),
        (
            lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)),
            r"layer '1' \(BatchNorm1d\)",
        ),
        (
            lambda: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)),
            r"layer '1' \(LayerNorm\)",
        ),
        (
            lambda: nn.Sequential(
                nn.Unflatten(1, (2, 2)),
                nn.Conv1d(2, 4, 1),
                nn.Conv1d(4, 4, 1, groups=2),
                nn.Flatten(),
                nn.Linear(8, 3),
            ),
            r"layer '2' \(Conv1d\).*groups",
        ),
        (frozen_model, "frozen"),
        (
            lambda: nn.Sequential(
                nn.Unflatten(1, (2, 2)),
                nn.LSTM(2, 3, batch_first=True, bidirectional=True),
                First(),
                nn.Flatten(),
                nn.Linear(12, 3),
            ),
            "one direction",
        ),
    ],
    ids=["residual", "shared", "BatchNorm", "LayerNorm", "groups", "frozen", "bidirectional"],
)
@pytest.mark.parametrize("method", ["pfnm", "fedma"])
def test_what_cannot_be_matched_is_named(method, model, said):
    with pytest.raises(InputError, match=said) as raised:
        Federation(model, classification(), method, modes=1)
    assert f"'{method}'" in str(raised.value)


class First(nn.Module):
    def forward(self, pair):
        return pair[0]


def test_growth_needs_units_that_can_be_off():
    def model():
        return nn.Sequential(nn.Linear(4, 6), nn.Sigmoid(), nn.Linear(6, 3))

    Federation(model, classification(), PFNM(), modes=1)
    with pytest.raises(InputError, match=r"layer '0' grow.*sigmoid"):
        Federation(model, classification(), PFNM(start=0.5), modes=1)


def test_modes_are_matched_apart():
    federation = train(small_federation(PFNM(lr=0.3), "vector", modes=4, strata=4), 1)
    alone = small_federation(PFNM(lr=0.3), "vector", modes=4, strata=4)
    returned = alone.engine.run_visits(*alone.next_request())
    members = returned.cohort.members
    assert members.client.tolist() == sorted(members.client.tolist())
    for mode in members.mode.unique().tolist():
        mine = members.mode == mode
        expected = alone.algorithm.merge(
            alone.algorithm.structure, members.uploads["theta"][mine], members.weight[mine]
        )
        torch.testing.assert_close(
            federation.state.modes["theta"][mode], expected, rtol=0, atol=CLOSE
        )


def test_reorder_undoes_itself():
    functional_model, context = make(*(f if i == 0 else f() for i, f in enumerate(MODELS["CNN"])))
    structure = find_structure(functional_model, context.examples, "test")
    theta = numbers(2, structure.length)
    slot = torch.cat(
        [
            u.first + torch.randperm(u.width, generator=torch.Generator().manual_seed(1))
            for u in structure.layers
        ]
    ).repeat(2, 1)
    there = structure.reorder(theta, slot)
    assert torch.equal(structure.reorder(there, torch.argsort(slot, 1)), theta)
    assert not torch.equal(there, theta)
