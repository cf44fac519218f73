"""PFNM and FedMA in the setting of their papers: clients whose models have initializations of their
own.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedensemble import FederatedData, Federation, InputError, Stratified
from fedensemble.algorithms import PFNM, FedMA
from fedensemble.algorithms.matching.assignment import nearest_units
from fedensemble.models import MLP
from fedensemble.testing import check_algorithm
from fedensemble.testing.toy_problems import classification, numbers, small_federation, train

CLOSE = 1e-10  # float64
CLIENTS = 10


@pytest.fixture(scope="module")
def digits():
    """Clients of five classes each, and a test set of all."""
    from sklearn.datasets import load_digits

    found = load_digits()
    x, y = torch.tensor(found.data / 16 - 0.3).float(), torch.tensor(found.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    place = torch.arange(len(y)) % 5
    clients = [
        ((y - client) % 10 == place) & (torch.arange(len(y)) >= 450) for client in range(CLIENTS)
    ]
    return FederatedData.from_clients([(x[mine], y[mine]) for mine in clients]), x[:450], y[:450]


def accuracy(federation, theta, x, y):
    outputs = federation.model.outputs(theta, federation.state.buffers[0], x)
    return float((outputs.argmax(-1) == y).double().mean())


@pytest.mark.parametrize("kind", [PFNM, FedMA])
def test_one_shot_matching_beats_averaging_by_far(kind, digits):
    data, x, y = digits
    federation = Federation(
        lambda: MLP((64,), 10, hidden=(64,)), data, kind(lr=0.1), modes=1, epochs=40
    )
    returned = federation.engine.run_visits(*federation.next_request())
    averaged = accuracy(federation, returned.uploads["theta"][0], x, y)
    each = [accuracy(federation, theta, x, y) for theta in returned.cohort.members.uploads["theta"]]
    matched = accuracy(federation, train(federation, 1).state.modes["theta"][0], x, y)
    assert matched > averaged + 0.2 and matched > max(each) + 0.2
    assert matched > 0.75


def test_layer_by_layer_matching_beats_averaging_by_far(digits):
    """FedMA's own procedure with two hidden layers: three rounds, in which clients keep what is not
    yet matched.
    """
    data, x, y = digits
    method = FedMA(lr=0.1, own_rounds=3)
    federation = Federation(
        lambda: MLP((64,), 10, hidden=(32, 32)), data, method, modes=1, epochs=20
    )
    returned = federation.engine.run_visits(*federation.next_request())
    averaged = accuracy(federation, returned.uploads["theta"][0], x, y)
    stage, frozen = federation.algorithm.structure.stage, None
    for layer in range(3):
        returned = federation.engine.run_visits(*federation.next_request())
        uploads = returned.cohort.members.uploads["theta"]
        if frozen is not None:
            assert torch.equal(uploads[:, stage < layer], frozen[stage < layer].expand(CLIENTS, -1))
        # what is not frozen is a client's own
        assert float(uploads[:, stage >= layer].std(0).mean()) > 0.01
        train(federation, 1)
        frozen = federation.state.modes["theta"][0]
    assert accuracy(federation, frozen, x, y) > averaged + 0.4


def one_visit_each(method, modes=2):
    federation = small_federation(method, "vector", modes=modes, strata=2)
    request = federation.next_request()
    return federation, federation.engine.run_visits(*request).cohort.members


def test_initialisations_are_the_models_own_and_differ():
    still = PFNM(lr=1e-12)
    federation, members = one_visit_each(still)
    drawn = federation.model.theta_layout.unflatten(members.uploads["theta"])
    reference = federation.model.theta_layout.unflatten(federation.model.init_params(3, 200)[0])
    for name, values in drawn.items():
        assert float(values.abs().max()) <= 1.1 * float(reference[name].abs().max())
        assert float((values[0] - values[1]).abs().min()) > 0
    _, again = one_visit_each(still)
    assert torch.equal(members.uploads["theta"], again.uploads["theta"])
    _, sent = one_visit_each(PFNM(lr=1e-12, own_rounds=0))
    theta = federation.state.modes["theta"][sent.mode]
    torch.testing.assert_close(sent.uploads["theta"], theta, rtol=0, atol=CLOSE)


def test_after_own_rounds_clients_start_from_the_matched_model():
    method = PFNM(lr=1e-12, own_rounds=2)
    federation = Federation(
        lambda: MLP((4,), 3, hidden=(5,)),
        classification(),
        method,
        dtype=torch.float64,
        batch_size=3,
        schedule=Stratified(modes=1, strata=1, clients_per_round=6),
    )
    uploads = []
    for left in (2, 1, 0, 0):
        assert federation.state.modes["own_rounds_left"].item() == left
        returned = federation.engine.run_visits(*federation.next_request())
        uploads.append(returned.cohort.members.uploads["theta"])
        before = federation.state.modes["theta"]
        train(federation, 1)
    # each client goes on with its own
    torch.testing.assert_close(uploads[1], uploads[0], rtol=0, atol=CLOSE)
    torch.testing.assert_close(uploads[3], before.expand(6, -1), rtol=0, atol=CLOSE)


def test_aligned_networks_compute_the_same():
    """Frozen layers that are a client's own units in another order: its function must not
    change.
    """
    method = FedMA(own_rounds=3)
    federation = Federation(
        lambda: MLP((4,), 3, hidden=(6, 5)), classification(), method, dtype=torch.float64
    )
    structure, model = federation.algorithm.structure, federation.model
    own, x = model.init_params(1, 2)[0], numbers(9, 4)
    random = torch.Generator().manual_seed(2)
    slot = torch.stack(
        [
            torch.cat(
                [u.first + torch.randperm(u.width, generator=random) for u in structure.layers]
            )
            for _ in own
        ]
    )
    for frozen in (0, 1, 2):
        theirs = structure.reorder(own, slot)
        count = torch.full((2, 1), float(frozen), dtype=torch.float64)
        found = federation.algorithm.aligned(own, {"theta": theirs, "frozen": count})
        assert torch.equal(found[:, structure.stage < frozen], theirs[:, structure.stage < frozen])
        for before, after in zip(own, found, strict=True):
            outputs = [model.outputs(theta, torch.empty(0), x) for theta in (before, after)]
            torch.testing.assert_close(*outputs, rtol=0, atol=CLOSE)
        alone = federation.algorithm.aligned(own[1], {"theta": theirs[1], "frozen": count[1]})
        assert torch.equal(alone, found[1])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31 - 1), st.integers(1, 7), st.integers(1, 4), st.data())
def test_nearest_units_are_permutations_and_find_copies(seed, width, networks, data):
    random = torch.Generator().manual_seed(seed)
    theirs = torch.randn(networks, width, 3, generator=random, dtype=torch.float64)
    order = torch.stack([torch.randperm(width, generator=random) for _ in range(networks)])
    own = theirs.gather(1, order.unsqueeze(2).expand(-1, -1, 3))  # unit u of `own` is unit order[u]
    everything = torch.ones(networks, width, dtype=torch.bool)
    assert torch.equal(nearest_units(own, theirs, everything, everything), order)
    used = torch.tensor(data.draw(st.lists(st.booleans(), min_size=width, max_size=width))).expand(
        networks, -1
    )
    found = nearest_units(torch.randn_like(own), theirs, everything, used)
    assert torch.equal(found.sort(1).values, torch.arange(width).expand(networks, -1))


@pytest.mark.parametrize(
    "method", [PFNM(own_rounds=3), FedMA(own_rounds=3), FedMA(own_rounds=2, start=0.5)], ids=repr
)
def test_contract_with_models_that_clients_keep(method):
    check_algorithm(method, "vector")


def test_server_state_of_older_files_is_completed():
    federation = train(small_federation(PFNM(own_rounds=0), "loop", modes=2, strata=2), 2)
    older = federation.tensors()
    assert "modes/own_rounds_left" not in older
    newer = small_federation(PFNM(), "loop", modes=2, strata=2)
    newer.restore(older, 2)
    assert newer.state.modes["own_rounds_left"].tolist() == [[0.0], [0.0]]
    assert torch.equal(
        train(newer, 1).state.modes["theta"], train(federation, 1).state.modes["theta"]
    )


def test_wrong_numbers_are_refused():
    with pytest.raises(InputError, match="own_rounds >= 0; got -1"):
        PFNM(own_rounds=-1)
