"""IFCA and FedEM, whose clients receive all modes, written again in NumPy, on both engines.

Clients of unlike size, of whom some share a labelling rule; 5 of 9 clients per round, minibatches,
a decaying rate, stragglers, and modes that nobody chooses. Only plans, minibatches and the initial
weights are the library's.
"""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

import fedensemble as fe
from fedensemble.algorithms import IFCA, FedEM
from fedensemble.core.participation import Everybody
from fedensemble.core.types import EnsembleState
from fedensemble.core.visits.batches import batch_table
from fedensemble.core.visits.visit_keys import visit_key
from fedensemble.engines.local.run_visits import run_visits
from fedensemble.personal.clusters import groups_in_names, recovered_share
from fedensemble.testing.toy_problems import numbers, train

SIZES = (7, 3, 5, 1, 9, 4, 6, 2, 8)
K, ROUNDS, SEED, INPUTS, CLASSES = 3, 12, 3, 4, 3
RATE = {"lr": 0.4, "lr_decay": 0.7, "lr_decay_every": 3}
CLOSE = 1e-10  # float64
ENGINES = pytest.mark.parametrize("engine", ["loop", "vector"])


def clients():
    """Client i labels by rule i mod 2."""
    rules = numbers(2, CLASSES, INPUTS, word=7)
    inputs = [numbers(size, INPUTS, word=30 + i) for i, size in enumerate(SIZES)]
    return [(x, (x @ rules[i % 2].T).argmax(1)) for i, x in enumerate(inputs)]


def federation(algorithm, engine="vector", modes=K, **options):
    options = {
        "model": lambda: nn.Linear(INPUTS, CLASSES, bias=False),
        "participation": Everybody(stragglers=0.4),
        "epochs": 2,
        "batch_size": 4,
        "clients_per_round": 5,
        **options,
    }
    data = fe.FederatedData.from_clients(clients())
    return fe.Federation(
        data=data, algorithm=algorithm, modes=modes, engine=engine, dtype=torch.float64,
        seed=SEED, **options,
    )  # fmt: skip


def log_softmax(z):
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


class Visit:
    """A client's rows, its learning rate, and the rows of each of its minibatches."""

    def __init__(self, made, plan, j, round):
        self.lr = RATE["lr"] * RATE["lr_decay"] ** (round // RATE["lr_decay_every"])
        self.client = int(plan.client[j])
        self.x, self.y = (part.numpy() for part in made.data.client(self.client))
        key = visit_key("batches", SEED, round, plan.client[j : j + 1], torch.tensor([0]))
        size, steps = torch.tensor([len(self.x)]), plan.steps[j : j + 1]
        rows, counted = batch_table(key, size, made.work, counts=steps)
        self.batches = [rows[s, 0][counted[s, 0].bool()].numpy() for s in range(len(rows))]

    def losses(self, w):
        return -log_softmax(self.x @ w.T)[np.arange(len(self.y)), self.y]

    def sgd(self, w, weight):
        for b in self.batches:
            slope = np.exp(log_softmax(self.x[b] @ w.T)) - np.eye(CLASSES)[self.y[b]]
            w = w - self.lr * (weight[b, None] * slope).T @ self.x[b] / len(b)
        return w


def rounds(made):
    for round in range(ROUNDS):
        plan = made.schedule.plan(made.state.schedule, round)
        plan = made.participation.limit_steps(plan, round, made.costs)
        yield [Visit(made, plan, j, round) for j in range(len(plan.client))]


def start_of(made):
    return made.state.modes["theta"].numpy().reshape(-1, CLASSES, INPUTS).copy()


def ifca(made, probe_every=1):
    """Models and the choice of each client; and how often a mode had no clients."""
    models, choice, count, idle = start_of(made), {}, {}, 0
    for visits in rounds(made):
        ends = {k: [] for k in range(len(models))}
        for v in visits:
            seen = count.get(v.client, 0)
            if seen == 0 or (probe_every and seen % probe_every == 0):
                choice[v.client] = int(np.argmin([v.losses(w).mean() for w in models]))
            count[v.client], k = seen + 1, choice[v.client]
            ends[k].append((len(v.x), v.sgd(models[k], np.ones(len(v.x)))))
        idle += sum(not each for each in ends.values())
        for k, each in ends.items():
            if each:
                models[k] = np.average([w for _, w in each], axis=0, weights=[n for n, _ in each])
    return models.reshape(len(models), -1), choice, idle


def best_partition(points, clusters):
    """The partition of the least squared distances to the means, by trying all of them."""

    def cost(label):
        groups = [points[np.array(label) == k] for k in set(label)]
        return sum(((group - group.mean(0)) ** 2).sum() for group in groups)

    return min(itertools.product(range(clusters), repeat=len(points)), key=cost)


def clustered_ifca(made, probe_every):
    """As `ifca`, from one model; the clusters of the first updates are the modes."""
    models, choice, count = start_of(made), {}, {}
    every_round = rounds(made)
    first = next(every_round)
    ends = [v.sgd(models[0], np.ones(len(v.x))) for v in first]
    updates = np.array([(end - models[0]).ravel() for end in ends])
    label = best_partition(updates / np.linalg.norm(updates, axis=1, keepdims=True), len(models))
    for number, group in enumerate(dict.fromkeys(label)):
        mine = [j for j in range(len(first)) if label[j] == group]
        models[number] = np.average(
            [ends[j] for j in mine], axis=0, weights=[len(first[j].x) for j in mine]
        )
    for visits in every_round:
        ends = {k: [] for k in range(len(models))}
        for v in visits:
            seen = count.get(v.client, 0)
            if seen == 0 or (probe_every and seen % probe_every == 0):
                choice[v.client] = int(np.argmin([v.losses(w).mean() for w in models]))
            count[v.client], k = seen + 1, choice[v.client]
            ends[k].append((len(v.x), v.sgd(models[k], np.ones(len(v.x)))))
        for k, each in ends.items():
            if each:
                models[k] = np.average([w for _, w in each], axis=0, weights=[n for n, _ in each])
    return models.reshape(len(models), -1), choice


def fedem(made):
    """Models and the weights of each client."""
    models, share = (
        start_of(made),
        np.full((len(SIZES), made.schedule.modes), 1 / made.schedule.modes),
    )
    for visits in rounds(made):
        ends, sizes = [], [len(v.x) for v in visits]
        for v in visits:
            q = share[v.client] * np.exp(-np.array([v.losses(w) for w in models])).T
            q /= q.sum(1, keepdims=True)
            share[v.client] = q.mean(0)
            ends.append([v.sgd(w, q[:, k]) for k, w in enumerate(models)])
        models = np.average(ends, axis=0, weights=sizes)
    return models.reshape(len(models), -1), share


@ENGINES
@pytest.mark.parametrize("probe_every", [1, 2, 0])
def test_ifca(engine, probe_every):
    made = federation(IFCA(probe_every=probe_every, **RATE), engine)
    models, choice, idle = ifca(made, probe_every)
    assert idle or probe_every == 0  # some mode rests in some round
    start = start_of(made).reshape(K, -1)
    train(made, ROUNDS)
    np.testing.assert_allclose(made.state.modes["theta"], models, rtol=0, atol=CLOSE)
    assert len(set(choice.values())) > 1 and np.abs(models - start).max() > 0.1
    weights = made.personal_weights(range(len(SIZES))).numpy()
    expected = [
        np.eye(K)[choice[i]] if i in choice else np.full(K, 1 / K) for i in range(len(SIZES))
    ]
    np.testing.assert_array_equal(weights, expected)


@ENGINES
@pytest.mark.parametrize("probe_every", [1, 2, 0])
def test_ifca_from_clusters(engine, probe_every):
    made = federation(IFCA(probe_every=probe_every, start="clusters", **RATE), engine)
    start = start_of(made)
    assert (start == start[0]).all()
    models, choice = clustered_ifca(made, probe_every)
    train(made, ROUNDS)
    np.testing.assert_allclose(made.state.modes["theta"], models, rtol=0, atol=CLOSE)
    assert len(set(choice.values())) > 1
    weights = made.personal_weights(range(len(SIZES))).numpy()
    expected = [
        np.eye(K)[choice[i]] if i in choice else np.full(K, 1 / K) for i in range(len(SIZES))
    ]
    np.testing.assert_array_equal(weights, expected)


@ENGINES
def test_fedem(engine):
    made = federation(FedEM(**RATE), engine)
    models, share = fedem(made)
    train(made, ROUNDS)
    np.testing.assert_allclose(made.state.modes["theta"], models, rtol=0, atol=CLOSE)
    weights = made.personal_weights(range(len(SIZES)))
    np.testing.assert_allclose(weights, share, rtol=0, atol=CLOSE)
    assert np.abs(share - 1 / K).max() > 0.1


@ENGINES
@pytest.mark.parametrize("optimizer", [fe.SGD(momentum=0.9), fe.Adam()], ids=["momentum", "Adam"])
@pytest.mark.parametrize("method", [IFCA, FedEM])
def test_with_one_mode_they_are_fedavg(method, optimizer, engine):
    joint, plain = (
        train(federation(kind(lr=0.05, optimizer=optimizer), engine, 1, model=with_norm), 4)
        for kind in (method, fe.FedAvg)
    )
    torch.testing.assert_close(joint.state.modes["theta"], plain.state.modes["theta"])
    torch.testing.assert_close(joint.state.buffers, plain.state.buffers)


def with_norm():
    return nn.Sequential(nn.Linear(INPUTS, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, CLASSES))


@pytest.mark.parametrize(
    "method", [IFCA(), IFCA(start="clusters"), FedEM()], ids=["ifca", "clusters", "fedem"]
)
def test_engines_agree_with_batch_norm_and_small_blocks(method):
    loop, vector = (
        train(federation(method, engine, model=with_norm, engine_options=options), 5)
        for engine, options in (("loop", {}), ("vector", {"block": 6}))  # two joint visits
    )
    torch.testing.assert_close(vector.state.modes["theta"], loop.state.modes["theta"])
    torch.testing.assert_close(vector.state.buffers, loop.state.buffers)
    assert float(loop.state.buffers.std(0).max()) > 0.01  # each mode has statistics of its own


def test_statistics_of_a_mode_that_nobody_chose_stay():
    made = federation(IFCA(lr=0.1), model=with_norm, clients_per_round=1)
    for _ in range(6):
        before = made.state.buffers.clone()
        report = next(made.rounds(1))
        assert len(report.trained) == 1  # one client, one choice
        for k in range(K):
            assert torch.equal(made.state.buffers[k], before[k]) == (k not in report.trained)


def test_with_one_client_per_round_equal_modes_stay_equal():
    """One client is no cluster: the modes are those of FedAvg until more of them reply."""
    options = {"model": with_norm, "clients_per_round": 1, "participation": "everybody"}
    waiting, plain = (
        train(federation(method, modes=modes, **options), 6)
        for method, modes in ((IFCA(start="clusters"), K), (fe.FedAvg(), 1))
    )
    for k in range(K):
        for name in ("theta", "buffers"):
            ours, theirs = (
                made.state.buffers if name == "buffers" else made.state.modes[name]
                for made in (waiting, plain)
            )
            torch.testing.assert_close(ours[k], theirs[0])
            assert torch.equal(ours[k], ours[0])
    assert waiting.personal_weights([0, 1]).tolist() == [[1 / K] * K] * 2


def test_only_the_round_that_is_clustered_gathers_uploads():
    made = federation(IFCA(start="clusters"), model=with_norm)
    gathered = []
    for _ in range(3):
        result = made.engine.run_visits(*made.next_request())
        gathered.append(result.cohort.members is not None)
        train(made, 1)
    assert gathered == [True, False, False]


def test_a_run_from_clusters_continues_bit_by_bit(tmp_path):
    """Saved before and after the round that is clustered."""
    options = {"model": with_norm}
    whole = train(federation(IFCA(start="clusters", probe_every=2), **options), 6)
    for saved_after in (0, 1, 3):
        part = train(federation(IFCA(start="clusters", probe_every=2), **options), saved_after)
        tensors = part.state.tensors(part.engine.client_state_tensors())
        state, memory = EnsembleState.of(tensors, saved_after, "cpu")
        other = federation(IFCA(start="clusters", probe_every=2), **options)
        other.state = state
        other.engine.load_client_state(memory)
        train(other, 6 - saved_after)
        assert torch.equal(other.state.modes["theta"], whole.state.modes["theta"])
        assert torch.equal(other.state.buffers, whole.state.buffers)


def groups_of_clients(seed, clients=6):
    """Four groups, each with a labelling rule of its own; clients have 20 to 200 examples."""
    rng = np.random.default_rng(seed)
    data, names = [], []
    for group in range(4):
        rule = rng.normal(size=(CLASSES, 16))
        for number in range(clients):
            x = rng.normal(size=(int(rng.integers(20, 200)), 16))
            data.append((torch.tensor(x), torch.tensor((x @ rule.T).argmax(1))))
            names.append(f"group {group}/{number}")
    return fe.FederatedData.from_clients(data), names


def recovered(seed, algorithm):
    data, names = groups_of_clients(seed)
    made = fe.Federation(
        lambda: nn.Linear(16, CLASSES), data, algorithm, modes=4, clients_per_round=16,
        epochs=2, batch_size=10, seed=seed, dtype=torch.float64,
    )  # fmt: skip
    train(made, 8)
    choice = made.personal_weights(range(len(names))).argmax(1)
    return recovered_share(choice, groups_in_names(names))


def test_groups_are_found_whatever_the_seed():
    """With random starts two groups share a mode under some seeds; from clusters, never."""
    seeds = range(8)
    random = [recovered(seed, IFCA(lr=0.2)) for seed in seeds]
    clusters = [recovered(seed, IFCA(lr=0.2, start="clusters")) for seed in seeds]
    assert min(random) < 0.8, random
    assert min(clusters) >= 0.95, clusters


def test_bytes():
    """4 clients; one mode is 12 values of 8 bytes; a choice takes one value."""

    def bytes_of(algorithm):
        made = federation(algorithm, clients_per_round=9, participation="everybody")
        return [(report.bytes_up, report.bytes_down) for report in made.rounds(3)]

    model, n = 12 * 8, len(SIZES)
    assert bytes_of(fe.FedAvg()) == [(n * model, n * model)] * 3
    assert bytes_of(FedEM()) == [(n * K * model, n * K * model)] * 3
    up = n * (model + 8)
    assert bytes_of(IFCA()) == [(up, n * K * model)] * 3
    whole, chosen = (up, n * K * model), (up, n * model)
    assert bytes_of(IFCA(probe_every=2)) == [whole, chosen, whole]
    assert bytes_of(IFCA(probe_every=0)) == [whole, chosen, chosen]
    # The first choice that counts is that of round 2.
    assert bytes_of(IFCA(start="clusters")) == [whole] * 3
    assert bytes_of(IFCA(start="clusters", probe_every=0)) == [whole, whole, chosen]


def test_time_of_devices_counts_all_modes():
    devices = fe.Devices(compute_ms=0.001, bandwidth_kbps=1.0)
    slow, fast = (
        next(federation(kind(), participation=devices).rounds(1)).turnout.seconds
        for kind in (FedEM, fe.FedAvg)
    )
    assert slow == pytest.approx(K * fast, rel=1e-3)


def test_an_encoded_upload_is_one_mode():
    made = federation(IFCA())
    algorithm = made.algorithm
    uploads = {"theta": torch.zeros(K * 12, dtype=torch.float64)}
    uploads["theta"][12:24] = torch.arange(12)
    uploads |= {
        f"trained_{k}": torch.tensor([float(k == 1)], dtype=torch.float64) for k in range(K)
    }
    message = algorithm.encode(uploads, torch.tensor(0.5))
    assert message["theta"].shape == (12,) and float(message["mode"]) == 1
    assert sum(8 * len(value) for value in message.values()) == algorithm.upload_bytes(
        uploads, None
    )
    decoded = algorithm.decode(message, uploads, torch.tensor(0.5))
    assert list(decoded) == list(uploads)
    assert all(torch.equal(decoded[name], uploads[name]) for name in uploads)
    for wrong in (3.0, -1.0, 0.5, float("nan")):
        with pytest.raises(ValueError, match=r"mode|NaN"):
            algorithm.decode({**message, "mode": torch.tensor([wrong])}, uploads, None)


def test_errors():
    with pytest.raises(fe.InputError, match="probe_every >= 0; got -1"):
        IFCA(probe_every=-1)
    with pytest.raises(fe.InputError, match="start 'random' or 'clusters'; got 'cluster'"):
        IFCA(start="cluster")
    with pytest.raises(fe.InputError, match=r"'ifca' receive all modes .* 'independent-kfold'"):
        federation(IFCA(), schedule="independent-kfold")
    with pytest.raises(
        fe.InputError, match=r"Aggregator 'median' .* 'fedem', whose clients upload"
    ):
        federation(FedEM(), aggregator="median")
    with pytest.raises(fe.InputError, match=r"Attacks on uploads .* algorithm 'ifca'"):
        federation(IFCA(), attack="sign-flip")
    with pytest.raises(fe.InputError, match=r"'fedem' cannot be used with .*receive all modes"):
        federation(FedEM(), shared=["weight"])
    with pytest.raises(fe.InputError, match=r"joint = True"):
        train(federation(Curious()), 1)


class Curious(fe.FedAvg):
    """Asks for what only joint visits have."""

    def local_training(self, sent, memory, problem):
        problem.row_losses(sent["theta"], problem.buffers)


def test_label_flipping_clients_can_be_simulated():
    made = train(federation(FedEM(), attack={"name": "label-flip", "share": 0.3}), 2)
    assert made.round == 2


def test_personal_weights_of_other_algorithms_are_equal():
    assert federation(fe.FedAvg()).personal_weights([2]).tolist() == [[1 / 3] * 3]
    with pytest.raises(fe.InputError, match=r"personal_weights\(\) needs clients below 9; got 9"):
        federation(IFCA()).personal_weights([9])
    made = train(federation(FedEM()), 1)
    assert made.personal_models([0, 1]).theta.shape == (2, K, 12)


@pytest.mark.parametrize("method", [IFCA, FedEM])
def test_trained_together_with_another_run(method):
    def make(lr):
        return federation(method(lr=lr), "vector", batch_size=4)

    made, expected = [make(0.4), make(0.1)], [make(0.4), make(0.1)]
    results = run_visits([f.engine for f in made], [f.next_request() for f in made])
    for together, alone, result in zip(made, expected, results, strict=True):
        together.run_round(result)
        train(alone, 1)
        torch.testing.assert_close(together.state.modes["theta"], alone.state.modes["theta"])
