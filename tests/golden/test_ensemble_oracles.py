"""FedAc, FedBE, FedBE-noKD, PFNM and FedMA inside the ensemble, written again in NumPy and compared
on both engines.

Three modes, two strata, four of nine clients per round, clients of unlike size, a decaying rate and
idle modes. Only the plans, the initial weights and the random numbers are the library's; gradients,
matching and distillation are not.
"""

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment

from fedensemble import FederatedData, Federation, Stratified, prng
from fedensemble.algorithms import PFNM, FedAc, FedBE, FedBENoKD, FedMA
from fedensemble.core.visits.visit_keys import shared_uniform, visit_key
from fedensemble.testing.toy_problems import labels, numbers, small_model

SIZES = (7, 3, 5, 1, 9, 4, 6, 2, 8)
K, STRATA, PER_ROUND, STEPS, ROUNDS, SEED = 3, 2, 4, 3, 10, 3
RATE = {"lr": 0.4, "lr_decay": 0.7, "lr_decay_every": 3}
CLOSE = 1e-10  # float64
INPUTS, HIDDEN, CLASSES = 4, 5, 3
CUTS = np.cumsum([HIDDEN * INPUTS, HIDDEN, CLASSES * HIDDEN])
ENGINES = pytest.mark.parametrize("engine", ["loop", "vector"])


def federation(algorithm, engine):
    """Every batch is all that a client has, so that gradients need no order of examples."""
    data = FederatedData.from_arrays(
        numbers(sum(SIZES), INPUTS),
        labels(sum(SIZES)),
        list(SIZES),
        x_server=numbers(11, INPUTS, word=4),
    )
    schedule = Stratified(modes=K, strata=STRATA, clients_per_round=PER_ROUND)
    return Federation(
        small_model,
        data,
        algorithm,
        schedule=schedule,
        engine=engine,
        steps=STEPS,
        batch_size=max(SIZES),
        dtype=torch.float64,
        seed=SEED,
    )


def parts(theta):
    """Weights and biases of both layers."""
    first, bias, second, last = np.split(theta, CUTS)
    return first.reshape(HIDDEN, INPUTS), bias, second.reshape(CLASSES, HIDDEN), last


def probabilities(theta, x):
    first, bias, second, last = parts(theta)
    hidden = np.tanh(x @ first.T + bias)
    raw = np.exp(hidden @ second.T + last)
    return hidden, raw / raw.sum(1, keepdims=True)


def gradient(theta, x, target):
    """Of the mean cross-entropy with target probabilities, by hand."""
    hidden, predicted = probabilities(theta, x)
    error = (predicted - target) / len(x)
    below = error @ parts(theta)[2] * (1 - hidden**2)
    return np.concatenate(
        [(below.T @ x).ravel(), below.sum(0), (error.T @ hidden).ravel(), error.sum(0)]
    )


class Rounds:
    """The rounds of a federation as NumPy sees them; `server` is called for each mode that somebody
    trained.
    """

    def __init__(self, made):
        self.made = made
        self.clients = [tuple(t.numpy() for t in made.data.client(i)) for i in range(len(SIZES))]
        self.start = made.state.modes["theta"].numpy().copy()

    def run(self, local, server):
        idle = 0
        for round in range(ROUNDS):
            plan = self.made.schedule.plan(self.made.state.schedule, round)
            self.lr = RATE["lr"] * RATE["lr_decay"] ** (round // RATE["lr_decay_every"])
            for mode in range(K):
                clients = plan.client[plan.mode == mode].tolist()
                idle += not clients
                if clients:
                    weight = np.array([SIZES[client] for client in clients], dtype=float)
                    answers = [local(mode, client, round) for client in clients]
                    server(mode, answers, weight / weight.sum(), round, clients)
        assert idle > 2
        for _ in self.made.rounds(ROUNDS):
            pass

    def gradient_of(self, client, theta):
        x, y = self.clients[client]
        return gradient(theta, x, np.eye(CLASSES)[y])

    def descend(self, client, theta, mask=1.0):
        for _ in range(STEPS):
            theta = theta - self.lr * mask * self.gradient_of(client, theta)
        return theta

    def key(self, round, mode, word):
        shared_draw = float(shared_uniform(SEED, round, torch.tensor(mode)))
        return prng.fold_in(torch.tensor([int(shared_draw * 2.0**53)]), word)

    def uniform(self, round, mode, client, size):
        key = visit_key("algorithm", SEED, round, torch.tensor([client]), torch.tensor([mode]))
        return prng.uniform(prng.fold_in(key, 1), size)[0].numpy()


def compare(found, expected):
    np.testing.assert_allclose(found.numpy(), np.stack(expected), rtol=0, atol=CLOSE)


@ENGINES
@pytest.mark.parametrize("coupling", ["I", "II"])
@pytest.mark.parametrize("mu", [0.05, None])
def test_fedac(mu, coupling, engine):
    made = federation(FedAc(mu=mu, coupling=coupling, **RATE), engine)
    rounds = Rounds(made)
    w, a = list(rounds.start), list(rounds.start)
    number = min(max((K / PER_ROUND) ** 2, 0.003), 0.3) if mu is None else mu

    def local(mode, client, round):
        lr, v, ag = rounds.lr, w[mode], a[mode]
        gamma = max(np.sqrt(lr / (number * STEPS)), lr)
        alpha = 1 / (gamma * number) if coupling == "I" else 3 / (2 * gamma * number) - 1 / 2
        beta = alpha + 1 if coupling == "I" else (2 * alpha**2 - 1) / (alpha - 1)
        for _ in range(STEPS):
            middle = v / beta + (1 - 1 / beta) * ag
            g = rounds.gradient_of(client, middle)
            ag, v = middle - lr * g, (1 - 1 / alpha) * v + middle / alpha - gamma * g
        return v, ag

    def server(mode, answers, share, round, clients):
        w[mode], a[mode] = (
            sum(s * one[part] for s, one in zip(share, answers, strict=True)) for part in (0, 1)
        )

    rounds.run(local, server)
    compare(made.state.modes["theta"], a)
    compare(made.state.modes["w"], w)


def drawn(rounds, mode, round, answers, share, count):
    """The mean of a mode's clients, and samples from the normal distribution about it."""
    mean = share @ np.stack(answers)
    spread = np.sqrt(share @ (np.stack(answers) - mean) ** 2)
    key = rounds.key(round, mode, 1)
    return mean, [
        mean + spread * prng.normal(prng.fold_in(key, s), len(mean))[0].numpy()
        for s in range(count)
    ]


@ENGINES
def test_fedbe_without_distillation(engine):
    made = federation(FedBENoKD(samples=4, **RATE), engine)
    rounds = Rounds(made)
    theta, samples = list(rounds.start), [np.tile(one, 4) for one in rounds.start]

    def server(mode, answers, share, round, clients):
        theta[mode], found = drawn(rounds, mode, round, answers, share, 4)
        samples[mode] = np.concatenate(found)

    rounds.run(lambda mode, client, round: rounds.descend(client, theta[mode]), server)
    compare(made.state.modes["theta"], theta)
    compare(made.state.modes["samples"], samples)
    x = numbers(8, INPUTS, word=9)
    each = [[probabilities(one, x.numpy())[1] for one in np.split(mode, 4)] for mode in samples]
    prediction = made.ensemble.predict(x)
    compare(prediction.modes, [np.mean(mode, 0) for mode in each])
    compare(prediction.members, [one for mode in each for one in mode])


@ENGINES
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_fedbe(reduction, engine):
    settings = {"samples": 3, "server_epochs": 3, "server_batch": 4, "cycle": 4, "temperature": 0.5}
    made = federation(
        FedBE(server_lr=0.3, server_lr_low=0.1, class_reduction=reduction, **settings, **RATE),
        engine,
    )
    rounds = Rounds(made)
    theta = list(rounds.start)
    x = made.data.x_server.numpy()

    def server(mode, answers, share, round, clients):
        student, samples = drawn(rounds, mode, round, answers, share, 3)
        # 1 / temperature
        said = np.mean([probabilities(one, x)[1] for one in (*samples, *answers, student)], 0) ** 2
        said /= said.sum(1, keepdims=True)
        velocity, ends, step = 0.0, [], 0
        for epoch in range(3):
            order = prng.permutation(prng.fold_in(rounds.key(round, mode, 2), epoch), len(x))[
                0
            ].numpy()
            for rows in (order[at : at + 4] for at in range(0, len(x), 4)):
                g = gradient(student, x[rows], said[rows]) / (CLASSES if reduction == "mean" else 1)
                velocity = 0.9 * velocity + g
                student = student - np.linspace(0.3, 0.1, 4)[step % 4] * velocity
                step += 1
                if step % 4 == 0:
                    ends.append(student)
        theta[mode] = np.mean(ends, 0)

    rounds.run(lambda mode, client, round: rounds.descend(client, theta[mode]), server)
    compare(made.state.modes["theta"], theta)


# A network as a list of units: a unit is its weights from the inputs, its bias and its weights to
# the outputs.
def units_of(theta):
    first, bias, second, _ = parts(theta)
    return np.concatenate([first, bias[:, None], second.T], 1)


def network(units, last):
    return np.concatenate(
        [units[:, :INPUTS].ravel(), units[:, INPUTS], units[:, INPUTS + 1 :].T.ravel(), last]
    )


def match(vectors, used, weight, sigma, sigma0, gamma, sweeps):
    """Global units of each client's units, [J, W]: equations 8 and 9 of PFNM's paper, clients in
    turn.
    """
    clients, width, _ = vectors.shape
    precision, place = weight / weight.mean() / sigma**2, -np.ones((clients, width), dtype=int)

    def assign(client):
        place[client] = -1
        others = [
            [(j, u) for j in range(clients) for u in range(width) if place[j, u] == i]
            for i in range(width)
        ]
        taken = [i for i in range(width) if others[i]]
        free = [i for i in range(width) if not others[i]]
        own = np.flatnonzero(used[client])
        if not taken:
            place[client, own] = own
            return
        gain = np.zeros((len(own), len(taken) + min(len(own), len(free))))
        for row, unit in enumerate(own):
            v, s = vectors[client, unit] * precision[client], precision[client]
            for column, i in enumerate(taken):
                total = sum(vectors[j, u] * precision[j] for j, u in others[i])
                known = sum(precision[j] for j, _ in others[i])
                n = len(others[i])
                gain[row, column] = ((v + total) ** 2).sum() / (sigma0**-2 + s + known)
                gain[row, column] += 2 * np.log(n / (clients - n)) - (total**2).sum() / (
                    sigma0**-2 + known
                )
            for rank in range(1, gain.shape[1] - len(taken) + 1):
                new = (
                    (v**2).sum() / (sigma0**-2 + s) - 2 * np.log(rank) + 2 * np.log(gamma / clients)
                )
                gain[row, len(taken) + rank - 1] = new
        rows, columns = linear_sum_assignment(gain, maximize=True)
        # any order of new units gains alike
        columns[columns >= len(taken)] = sorted(columns[columns >= len(taken)])
        place[client, own[rows]] = np.array([*taken, *free])[columns]

    for _ in range(1 + (sweeps if clients > 1 else 0)):
        for client in range(clients):
            assign(client)
    return place


def merged(answers, share, places, used):
    """Each global unit is the mean over the clients that have it; the output biases are the mean
    over all.
    """
    units = np.zeros((HIDDEN, INPUTS + 1 + CLASSES))
    for i in range(HIDDEN):
        there = [
            (j, u)
            for j in range(len(answers))
            for u in range(HIDDEN)
            if places[j, u] == i and used[j, u]
        ]
        if there:
            units[i] = sum(share[j] * units_of(answers[j])[u] for j, u in there) / sum(
                share[j] for j, _ in there
            )
    return network(units, sum(s * parts(one)[3] for s, one in zip(share, answers, strict=True)))


def nearest(mine, theirs):
    """The place of each of a network's units among another's by what feeds them: closest pairs
    first, unused last.
    """
    feeding = slice(INPUTS + 1)
    distance = np.linalg.norm(mine[:, None, feeding] - theirs[:, feeding], axis=2)
    distance[~np.outer(np.any(mine != 0, 1), np.any(theirs != 0, 1))] = 1e6
    place = np.zeros(HIDDEN, dtype=int)
    for _ in range(HIDDEN):
        row, column = np.unravel_index(distance.argmin(), distance.shape)
        place[row] = column
        distance[row], distance[:, column] = np.inf, np.inf
    return place


@ENGINES
@pytest.mark.parametrize("start", [1.0, 0.6])
@pytest.mark.parametrize(
    ("kind", "own_rounds"), [(PFNM, 0), (PFNM, 1), (PFNM, 3), (FedMA, 0), (FedMA, 2)]
)
def test_matching(kind, own_rounds, start, engine):
    prior = {"sigma": 0.3, "sigma0": 2.0, "gamma": 2.0}
    made = federation(kind(start=start, own_rounds=own_rounds, sweeps=2, **prior, **RATE), engine)
    rounds = Rounds(made)
    theta, frozen, left, own = list(rounds.start), [0] * K, [own_rounds] * K, {}
    size, layered = len(theta[0]), kind is FedMA
    drawn_models = made.model.init_params(0, 8)[0].numpy()
    pieces = [slice(a, b) for a, b in zip([0, *CUTS], [*CUTS, size], strict=True)]
    middle, width = (np.zeros(size) for _ in range(2))
    for piece in pieces:
        middle[piece], width[piece] = (
            drawn_models[:, piece].mean(),
            np.sqrt(3) * drawn_models[:, piece].std(),
        )
    mask = network(
        np.repeat(np.arange(HIDDEN) < np.ceil(start * HIDDEN), 8).reshape(HIDDEN, 8).astype(float),
        np.ones(CLASSES),
    )
    upper = np.arange(size) >= CUTS[1]

    def local(mode, client, round):
        at = theta[mode]
        if left[mode]:
            fresh = (middle + width * (2 * rounds.uniform(round, mode, client, size) - 1)) * mask
            at = own.get((client, mode), fresh) if own_rounds > 1 else fresh
            # FedMA: the frozen layer is the server's, the client's units go to the nearest ones
            if frozen[mode]:
                mine, theirs = units_of(at), units_of(theta[mode])
                place = nearest(mine, theirs)
                moved = np.zeros_like(mine)
                moved[place] = mine
                moved[:, : INPUTS + 1] = theirs[:, : INPUTS + 1]
                at = network(moved, parts(at)[3])
        own[client, mode] = rounds.descend(client, at, upper if frozen[mode] else 1.0)
        return own[client, mode]

    def server(mode, answers, share, round, clients):
        units = np.stack([units_of(one) for one in answers])
        used = (units != 0).any(2)
        weight = np.array([SIZES[client] for client in clients], dtype=float)
        vectors = units[:, :, : INPUTS + 1] if layered else units
        places = match(vectors, used, weight, sweeps=2, **prior)
        theta[mode] = merged(answers, share, places, used)
        frozen[mode] = (frozen[mode] + 1) % 2 if layered else 0
        left[mode] = max(left[mode] - 1, 0)

    rounds.run(local, server)
    compare(made.state.modes["theta"], theta)
