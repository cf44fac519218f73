"""Every method against NumPy in the setting users run: three modes, partial participation, unequal
clients, decay.

The re-implementations below know the equations of the papers and nothing of the library. Only
plans, minibatches and random numbers are the library's. A mode that nobody trains keeps everything;
a client remembers each mode apart.
"""

from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

import fedensemble as fe
from fedensemble import algorithms, prng
from fedensemble.core.visits.batches import batch_table
from fedensemble.core.visits.visit_keys import shared_uniform, visit_key
from fedensemble.testing.toy_problems import numbers

SIZES = (3, 14, 5, 9, 4, 11, 7, 3, 8)
FEATURES, MODES, ROUNDS = 5, 3, 14
LR, DECAY, EVERY = 0.03, 0.8, 3
SERVER = {"server_lr_decay": 0.9, "server_lr_decay_every": 4}
AGREEMENT = 1e-10


@cache
def chances(seed, work, client, mode, round):
    """Minibatches and random numbers of a visit, which are the same whatever the method."""
    place = (seed, round, torch.tensor([client]), torch.tensor([mode]))
    size = torch.tensor([SIZES[client]])
    rows, counted = batch_table(visit_key("batches", *place), size, work)
    batches = [rows[s, 0][counted[s, 0].bool()].numpy() for s in range(len(rows))]
    random = prng.uniform(prng.fold_in(visit_key("algorithm", *place)[0], 1), FEATURES)
    return batches, random.numpy()


class Visit:
    """What a client has in a visit: minibatch gradients, the rate and random numbers."""

    def __init__(self, world, client, mode, round):
        self.world, self.lr = world, LR * DECAY ** (round // EVERY)
        self.batches, self.random = chances(world.seed, world.work, client, mode, round)
        self.x, self.y = (part.numpy() for part in world.data.client(client))

    def gradient(self, w, batch):
        x, y = self.x[batch], self.y[batch, 0]
        return 2 * x.T @ (x @ w - y) / len(batch)

    def sgd(self, w, extra=lambda v: 0.0):
        for batch in self.batches:
            w = w - self.lr * (self.gradient(w, batch) + extra(w))
        return w


class Server:
    """What the server knows of a mode's round."""

    def __init__(self, world, mode, round, share):
        self.round, self.share, self.lr = round, share, LR * DECAY ** (round // EVERY)
        self.decay = 0.9 ** (round // 4)
        self.shared_draw = float(shared_uniform(world.seed, round, torch.tensor(mode)))
        key = prng.fold_in(torch.tensor(int(self.shared_draw * 2.0**53)), 0)
        self.random = prng.uniform(key, FEATURES).numpy()


def fedavg(state, kept, visit):
    return {"w": visit.sgd(state["w"])}, kept


def ternary(x, random, block=2):
    """Each block keeps sign and largest size with a probability in proportion to an entry's size,
    else 0.
    """
    out = np.zeros_like(x)
    for first in range(0, len(x), block):
        part = slice(first, first + block)
        largest = np.abs(x[part]).max()
        if largest > 0:
            out[part] = largest * np.sign(x[part]) * (random[part] < np.abs(x[part]) / largest)
    return out


class FedAvg:
    make = staticmethod(fe.FedAvg)
    client = staticmethod(fedavg)

    def start(self, w):
        return {"w": w}

    def server(self, state, mean, info):
        return {"w": mean["w"]}


class FedProx(FedAvg):
    make = staticmethod(lambda **o: fe.FedProx(mu=0.7, **o))

    def client(self, state, kept, visit):
        w = state["w"]
        return {"w": visit.sgd(w, lambda v: 0.7 * (v - w))}, kept


class FedAvgM(FedAvg):
    make = staticmethod(lambda **o: fe.FedAvgM(beta=0.7, server_lr=0.6, **SERVER, **o))

    def start(self, w):
        return {"w": w, "v": 0 * w}

    def server(self, state, mean, info):
        v = 0.7 * state["v"] + mean["w"] - state["w"]
        return {"w": state["w"] + 0.6 * info.decay * v, "v": v}


class FedNova(FedAvg):
    """The effective number of steps is found by the recursion that the gradients go through."""

    def __init__(self, momentum):
        self.momentum, sgd = momentum, fe.SGD(momentum=momentum)
        self.make = lambda **o: algorithms.FedNova(server_lr=0.9, optimizer=sgd, **SERVER, **o)

    def client(self, state, kept, visit):
        w, v, steps, velocity = state["w"], 0 * state["w"], 0.0, 0.0
        for batch in visit.batches:
            v = self.momentum * v + visit.gradient(w, batch)
            w = w - visit.lr * v
            velocity = self.momentum * velocity + 1
            steps += velocity
        return {"d": (state["w"] - w) / (visit.lr * steps), "lr steps": visit.lr * steps}, kept

    def server(self, state, mean, info):
        return {"w": state["w"] - 0.9 * info.decay * mean["lr steps"] * mean["d"]}


class Adaptive(FedAvg):
    def __init__(self, kind, second):
        betas = {} if kind is fe.FedAdagrad else {"beta2": 0.9}
        self.second = second
        self.make = lambda **o: kind(server_lr=0.1, beta1=0.6, tau=0.05, **betas, **SERVER, **o)

    def start(self, w):
        return {"w": w, "m": 0 * w, "v": 0 * w + 0.05**2}

    def server(self, state, mean, info):
        d = mean["w"] - state["w"]
        m, v = 0.6 * state["m"] + 0.4 * d, self.second(state["v"], d**2)
        return {"w": state["w"] + 0.1 * info.decay * m / (np.sqrt(v) + 0.05), "m": m, "v": v}


class Scaffold(FedAvg):
    make = staticmethod(lambda **o: fe.Scaffold(server_lr=0.8, **SERVER, **o))

    def start(self, w):
        return {"w": w, "c": 0 * w}

    def client(self, state, kept, visit):
        w, c, own = state["w"], state["c"], kept if kept is not None else 0 * state["w"]
        end = visit.sgd(w, lambda v: c - own)
        new = own - c + (w - end) / (len(visit.batches) * visit.lr)
        return {"w": end - w, "c": new - own}, new

    def server(self, state, mean, info):
        return {
            "w": state["w"] + 0.8 * info.decay * mean["w"],
            "c": state["c"] + info.share * mean["c"],
        }


class FedDyn(FedAvg):
    make = staticmethod(lambda **o: fe.FedDyn(alpha=0.6, **o))

    def start(self, w):
        return {"w": w, "h": 0 * w}

    def client(self, state, kept, visit):
        w, h = state["w"], kept if kept is not None else 0 * state["w"]
        end = visit.sgd(w, lambda v: 0.6 * (v - w) - h)
        return {"w": end}, h - 0.6 * (end - w)

    def server(self, state, mean, info):
        h = state["h"] - 0.6 * info.share * (mean["w"] - state["w"])
        return {"w": mean["w"] - h / 0.6, "h": h}


def reflected(x, z, visit, s=0.8):
    """FedSplit's next z_i, and z_half."""
    half = visit.sgd(x, lambda v: (v - (2 * x - z)) / s)
    return z + 2 * (half - x), half


class FedSplitReporting(FedAvg):
    make = staticmethod(lambda **o: fe.FedSplit(s=0.8, average="reporting", **o))

    def start(self, w):
        return {"w": w, "updates": 0}

    def client(self, state, kept, visit):
        x, updates = state["w"], state["updates"]
        z, pull, last = kept if kept is not None else (x, 0 * x, None)
        z = z if last == updates - 1 else x - pull
        u = 2 * x - z
        z, half = reflected(x, z, visit)
        return {"w": z}, (z, u - half, updates)

    def server(self, state, mean, info):
        return {"w": mean["w"], "updates": state["updates"] + 1}


class OfAll(FedAvg):
    """The model is the weighted mean of a vector over all clients that were ever seen; all vectors
    are at hand here.
    """

    def __init__(self, make, step):
        self.make, self.step = make, step

    def start(self, w):
        return {"w": w, "all": {}}

    def client(self, state, kept, visit):
        vector, kept = self.step(state["w"], kept, visit)
        return {"vector": vector}, kept

    def collect(self, state, clients, uploads, weights):
        state["all"] |= {
            i: (weights[i], upload["vector"]) for i, upload in zip(clients, uploads, strict=True)
        }

    def server(self, state, mean, info):
        total = sum(weight for weight, _ in state["all"].values())
        return {
            "w": sum(weight * vector for weight, vector in state["all"].values()) / total,
            "all": state["all"],
        }


def split_step(x, kept, visit):
    z, _ = reflected(x, x if kept is None else kept, visit)
    return z, z


def primal_dual(start, dual, visit, eta=0.9):
    end = visit.sgd(start, lambda v: dual + (v - start) / eta)
    dual = dual + (end - start) / eta
    return end + eta * dual, dual


def dual_step(x, kept, visit):
    return primal_dual(x, 0 * x if kept is None else kept, visit)


class FedPDReporting(FedAvg):
    make = staticmethod(lambda **o: fe.FedPD(eta=0.9, p=0.4, average="reporting", **o))

    def start(self, w):
        return {"w": w, "talks": 0}

    def client(self, state, kept, visit):
        own, dual, talks = kept if kept is not None else (None, 0 * state["w"], None)
        start = own if talks == state["talks"] else state["w"]
        own, dual = primal_dual(start, dual, visit)
        return {"w": own}, (own, dual, state["talks"])

    def server(self, state, mean, info):
        return {"w": mean["w"], "talks": state["talks"] + 1} if info.shared_draw >= 0.4 else state


class FedAc(FedAvg):
    def __init__(self, coupling):
        self.coupling, self.make = coupling, lambda **o: fe.FedAc(mu=0.2, coupling=coupling, **o)

    def start(self, w):
        return {"w": w, "x": w}  # "w" is the aggregate sequence, which is the model

    def client(self, state, kept, visit):
        gamma = max(np.sqrt(visit.lr / (0.2 * len(visit.batches))), visit.lr)
        alpha = 1 / (gamma * 0.2) if self.coupling == "I" else 1.5 / (gamma * 0.2) - 0.5
        beta = alpha + 1 if self.coupling == "I" else (2 * alpha**2 - 1) / (alpha - 1)
        x, aggregate = state["x"], state["w"]
        for batch in visit.batches:
            middle = x / beta + (1 - 1 / beta) * aggregate
            g = visit.gradient(middle, batch)
            aggregate, x = middle - visit.lr * g, (1 - 1 / alpha) * x + middle / alpha - gamma * g
        return {"w": aggregate, "x": x}, kept

    def server(self, state, mean, info):
        return mean


class QSGD(FedAvg):
    make = staticmethod(lambda **o: fe.QSGD(block=2, **o))

    def client(self, state, kept, visit):
        return {"d": ternary(visit.sgd(state["w"]) - state["w"], visit.random)}, kept

    def server(self, state, mean, info):
        return {"w": state["w"] + mean["d"]}


class Diana(FedAvg):
    make = staticmethod(
        lambda **o: fe.Diana(block=2, alpha=0.3, beta=0.5, server_lr=0.4, **SERVER, **o)
    )

    def start(self, w):
        return {"w": w, "h": 0 * w, "v": 0 * w}

    def client(self, state, kept, visit):
        h = kept if kept is not None else 0 * state["w"]
        d = ternary((state["w"] - visit.sgd(state["w"])) / visit.lr - h, visit.random)
        return {"d": d}, h + 0.3 * d

    def server(self, state, mean, info):
        v = 0.5 * state["v"] + state["h"] + mean["d"]
        w = state["w"] - 0.4 * info.decay * info.lr * v
        return {"w": w, "h": state["h"] + 0.3 * info.share * mean["d"], "v": v}


class Dore(Diana):
    make = staticmethod(
        lambda **o: fe.Dore(block=2, alpha=0.3, beta=0.8, eta=0.4, server_lr=0.4, **SERVER, **o)
    )

    def start(self, w):
        return {"w": w, "h": 0 * w, "e": 0 * w}

    def server(self, state, mean, info):
        q = 0.4 * state["e"] - 0.4 * info.decay * info.lr * (state["h"] + mean["d"])
        r = ternary(q, info.random)
        return {
            "w": state["w"] + 0.8 * r,
            "h": state["h"] + 0.3 * info.share * mean["d"],
            "e": q - r,
        }


ORACLES = {
    "fedavg": FedAvg(),
    "fedprox": FedProx(),
    "fedavgm": FedAvgM(),
    "fednova": FedNova(momentum=0.0),
    "fednova, momentum": FedNova(momentum=0.8),
    "fedadagrad": Adaptive(fe.FedAdagrad, lambda v, square: v + square),
    "fedadam": Adaptive(fe.FedAdam, lambda v, square: 0.9 * v + 0.1 * square),
    "fedyogi": Adaptive(fe.FedYogi, lambda v, square: v - 0.1 * square * np.sign(v - square)),
    "scaffold": Scaffold(),
    "feddyn": FedDyn(),
    "fedsplit, reporting": FedSplitReporting(),
    "fedsplit, all": OfAll(lambda **o: fe.FedSplit(s=0.8, average="all", **o), split_step),
    "fedpd, reporting": FedPDReporting(),
    "fedpd, all": OfAll(lambda **o: fe.FedPD(eta=0.9, average="all", **o), dual_step),
    "fedac, I": FedAc("I"),
    "fedac, II": FedAc("II"),
    "qsgd": QSGD(),
    "diana": Diana(),
    "dore": Dore(),
}


def unequal_clients():
    clients = []
    for index, size in enumerate(SIZES):
        x = numbers(size, FEATURES, word=40 + index)
        y = x @ numbers(FEATURES, word=60 + index) + 0.1 * numbers(size, word=80 + index)
        clients.append((x, y.unsqueeze(1)))
    return fe.FederatedData.from_clients(clients)


def federation(algorithm, engine="vector"):
    return fe.Federation(
        lambda: nn.Linear(FEATURES, 1, bias=False),
        unequal_clients(),
        algorithm,
        loss="mse",
        epochs=2,
        batch_size=4,
        engine=engine,
        dtype=torch.float64,
        modes=MODES,
        strata=2,
        clients_per_round=4,
        seed=3,
    )


def trajectory(oracle, world, weighting):
    """The models [K, P] after each round, and how many times a mode was idle."""
    weights = np.array(SIZES, dtype=float) if weighting == "examples" else np.ones(len(SIZES))
    states = [oracle.start(w.copy()) for w in world.state.modes["theta"].numpy()]
    memory, path, idle = {}, [], 0
    for round in range(ROUNDS):
        plan = world.schedule.plan(world.state.schedule, round)
        for mode in range(MODES):
            clients = plan.client[plan.mode == mode].tolist()
            if not clients:
                idle += 1
                continue
            uploads = []
            for i in clients:
                upload, memory[i, mode] = oracle.client(
                    states[mode], memory.get((i, mode)), Visit(world, i, mode, round)
                )
                uploads.append(upload)
            if isinstance(oracle, OfAll):
                oracle.collect(states[mode], clients, uploads, weights)
            total = weights[clients].sum()
            mean = {
                name: sum(weights[i] * u[name] for i, u in zip(clients, uploads, strict=True))
                / total
                for name in uploads[0]
            }
            states[mode] = oracle.server(
                states[mode], mean, Server(world, mode, round, total / weights.sum())
            )
        path.append(np.stack([state["w"] for state in states]))
    return path, idle


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
@pytest.mark.parametrize("name", ORACLES)
def test_against_numpy(name, weighting):
    oracle = ORACLES[name]
    algorithm = oracle.make(lr=LR, lr_decay=DECAY, lr_decay_every=EVERY, weighting=weighting)
    expected, idle = trajectory(oracle, federation(algorithm), weighting)
    assert idle >= ROUNDS  # two strata and three modes: one of them at least rests in every round
    for engine in ("loop", "vector"):
        run = federation(algorithm, engine)
        for models, report in zip(expected, run.rounds(ROUNDS), strict=True):
            got = run.state.modes["theta"].numpy()
            np.testing.assert_allclose(
                got, models, rtol=0, atol=AGREEMENT, err_msg=f"{engine}, round {report.round}"
            )
    # something was learned, so something was compared
    assert np.abs(expected[-1] - expected[0]).max() > 1e-2


def test_every_method_has_an_oracle():
    """Those that fit a distribution or match units have theirs in test_ensemble_oracles, those whose
    modes interact in test_coupled_modes and test_svgd, posterior samples in test_posterior.
    """
    known = {name.split(",")[0] for name in ORACLES}
    elsewhere = {"fedbe", "fedbe-nokd", "pfnm", "fedma", "fedcross", "fedsdd", "svgd", "anchored"}
    elsewhere |= {"ditto", "local", "ifca", "fedem"}  # test_personal, test_joint_visits
    assert known | elsewhere == set(fe.algorithms)


def test_dore_downloads_what_a_client_missed():
    """Counted from the plans alone: each change since the last visit, or the model; and a count of
    8 bytes.
    """
    world = federation(fe.Dore(lr=LR, block=3, compressor="dither", levels=1))
    change, model = world.algorithm.codec.bytes(FEATURES, 8), 8 * FEATURES
    assert change < model < 3 * change
    updates, last, costs = [0] * MODES, {}, set()
    for report in world.rounds(ROUNDS):
        visits = list(zip(report.plan.client.tolist(), report.plan.mode.tolist(), strict=True))
        missed = [
            updates[mode] - last[i, mode] if (i, mode) in last else None for i, mode in visits
        ]
        each = [model if count is None else min(count * change, model) for count in missed]
        assert report.bytes_down == sum(each) + 8 * len(visits)
        costs |= set(each)
        last |= {visit: updates[visit[1]] for visit in visits}
        for mode in report.trained:
            updates[mode] += 1
    assert costs == {change, 2 * change, model}
