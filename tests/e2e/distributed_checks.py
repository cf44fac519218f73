"""Checks of a rank against the same training in one process; started by torchrun."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from fedensemble.algorithms import (
    IFCA,
    Dore,
    FedAvg,
    FedAvgM,
    FedCross,
    FedDyn,
    FedEM,
    FedPD,
    FedSDD,
    FedSplit,
    Scaffold,
)
from fedensemble.averages import SWAG
from fedensemble.config.schema import resolve
from fedensemble.core.algorithm import Algorithm
from fedensemble.core.schedule import schedules
from fedensemble.engines.distributed.engine import DistributedEngine
from fedensemble.engines.distributed.launch import job
from fedensemble.errors import DivergedError, InputError, RankError
from fedensemble.experiment.setup import check_ranks_agree
from fedensemble.federation.federation import Federation
from fedensemble.participation import Devices, Everybody
from fedensemble.robust import attacks
from fedensemble.schedules import Stratified
from fedensemble.testing.assertions import remembered, require, require_close, require_equal
from fedensemble.testing.cases import CASES
from fedensemble.testing.toy_problems import classification, small_federation, small_model

ROUNDS = 4


@dataclass(frozen=True, kw_only=True)
class Middle(Algorithm):
    """A test algorithm whose server reads every upload: their median, and a digest of them all."""

    gathers = True

    def init_mode(self, theta):
        return {"theta": theta, "digest": torch.zeros_like(theta[..., :1])}

    def local_training(self, sent, memory, problem):
        return {"theta": problem.descend(sent["theta"])}, {}

    def server_update(self, mode, uploads, cohort):
        members = cohort.members
        order = torch.arange(1, len(members.client) + 1, dtype=members.weight.dtype)
        signed = order * members.weight * (1 + members.client) * members.uploads["theta"].sum(-1)
        theta = mode["theta"].clone()
        for k in set(members.mode.tolist()):
            theta[k] = members.uploads["theta"][members.mode == k].median(0).values
        return {"theta": theta, "digest": mode["digest"] + signed.sum()}


def distribute(federation, ranks):
    """Replaces the federation's engine by one that uses all ranks."""
    federation.engine = DistributedEngine(federation.engine, ranks)
    return federation


def agree_with_one_process(make, ranks, rounds=ROUNDS):
    """Trains in one process and on all ranks; compares plans, losses, bytes and all state."""
    alone, many = make(), distribute(make(), ranks)
    for mine, theirs in zip(many.rounds(rounds), alone.rounds(rounds), strict=True):
        require_equal(mine.plan.tensors(), theirs.plan.tensors(), "the plan")
        require_close(
            {"losses": mine.losses}, {"losses": theirs.losses}, f"losses of round {mine.round}"
        )
        require((mine.bytes_up, mine.bytes_down) == (theirs.bytes_up, theirs.bytes_down), "bytes")
    require_close(many.state.modes, alone.state.modes, "modes")
    require_close(many.state.average, alone.state.average, "averages")
    require_close(
        {"buffers": many.state.buffers}, {"buffers": alone.state.buffers}, "running statistics"
    )
    state = remembered(many.engine)
    require_close(state, remembered(alone.engine) if ranks.rank == 0 else {}, "client state")


def methods(engine):
    return {
        f"{algorithm} on {engine}": lambda algorithm=algorithm: small_federation(
            algorithm, engine, modes=2, strata=2, average=SWAG(start=0, rank=2)
        )
        for algorithm in (FedAvg(), FedAvg(weighting="uniform"), Scaffold(), FedDyn(), Middle())
    } | {
        f"visits that stop early on {engine}": lambda: small_federation(
            Scaffold(), engine, modes=2, strata=2, participation=Everybody(stragglers=0.7)
        )
    }


def sharing(engine):
    """Shared parameters are averaged over the visits of all ranks."""
    return {
        f"{name} with a shared layer on {engine}": lambda algorithm=algorithm, rule=rule: (
            small_federation(algorithm, engine, modes=3, strata=2, shared=["0.*"], aggregator=rule)
        )
        for name, algorithm, rule in (
            ("FedAvgM", FedAvgM(), "mean"),
            ("the trimmed mean", FedAvg(), "trimmed-mean"),
        )
    }


def personal(engine):
    """Each rank keeps the personal parts of its own clients, in any order of training."""
    return {
        f"personal parts, alternate {alternate}, on {engine}": lambda alternate=alternate: (
            small_federation(
                Scaffold(), engine, modes=3, strata=2, personal=["2.*"], alternate=alternate
            )
        )
        for alternate in (False, True)
    }


def robust(engine):
    """Aggregators and attacks get the uploads of all ranks; two of six clients are malicious."""
    return {
        f"{aggregator} against {attack} on {engine}": lambda aggregator=aggregator, attack=attack: (
            Federation(
                small_model,
                classification(),
                FedAvg(),
                dtype=torch.float64,
                batch_size=3,
                engine=engine,
                schedule=Stratified(modes=2, strata=2, clients_per_round=6),
                aggregator=aggregator,
                attack=attacks[attack](share=0.34),
            )
        )
        for aggregator, attack in (
            ("median", "noise"),
            ("krum", "alie"),
            ("mean", "ipm"),
            ("multi-krum", "label-flip"),
        )
    }


def coupled():
    """With two strata, one of three modes at least is idle."""
    return {
        f"{algorithm}": lambda algorithm=algorithm: small_federation(
            algorithm, "vector", modes=3, strata=2
        )
        for algorithm in (FedCross(alpha=0.8, partner="lowest"), FedSDD(server_lr=0.2))
    }


def adaptive():
    """Reports of visits reach the schedule from all ranks."""
    return {
        f"schedule {name}": lambda name=name: small_federation(
            FedAvg(),
            "vector",
            modes=3,
            strata=2,
            schedule=schedules[name](modes=3, strata=2, clients_per_round=4),
        )
        for name in ("worst-mode", "by-gradient")
    }


def joint():
    """Each client receives all modes; one of three modes may have no client."""
    return {
        f"{algorithm} on {engine}": lambda algorithm=algorithm, engine=engine: small_federation(
            algorithm, engine, modes=3, strata=2
        )
        for algorithm in (IFCA(probe_every=2), IFCA(start="clusters"), FedEM())
        for engine in ("loop", "vector")
    }


def models():
    return {
        case.name: lambda case=case: Federation(
            case.model,
            case.data(),
            FedAvg(optimizer=case.optimizer),
            dtype=torch.float64,
            batch_size=3,
            schedule=Stratified(modes=2, strata=2, clients_per_round=5),
            **case.settings,
        )
        for case in CASES
        if case.name
        in (
            "CNN with Dropout and Dropout2d",
            "BatchNorm",
            "frozen parameters",
            "a frozen body that all modes share",
        )
    }


def one_client_per_round(ranks):
    """In every round one rank has no visits: in some the second one, in others the first."""
    agree_with_one_process(
        lambda: Federation(
            small_model,
            classification(),
            Scaffold(),
            dtype=torch.float64,
            batch_size=3,
            modes=2,
            clients_per_round=1,
            strata=1,
        ),
        ranks,
        rounds=6,
    )


def bytes_on_a_simulated_clock(ranks):
    """The size of a download depends on client state, which is on one rank and needed on all."""
    for algorithm in (
        Dore(block=8, lr_decay=0.5, lr_decay_every=2),
        FedPD(p=0.5),
        FedSplit(average="all"),
    ):
        agree_with_one_process(
            lambda algorithm=algorithm: small_federation(
                algorithm, "vector", modes=2, strata=2, participation=Devices(ask=5)
            ),
            ranks,
            rounds=8,
        )


def a_rank_that_fails(ranks):
    """All ranks raise, and the client state of an unfinished round is not used."""
    federation = distribute(small_federation(Scaffold(), "vector", 2, 2), ranks)
    next(federation.rounds(1))
    saved, visit = federation.tensors(), federation.engine.inner.run_visits

    def fail(*arguments):
        raise InputError("no more paper")

    federation.engine.inner.run_visits = fail if ranks.rank == 1 else visit
    expected, words = (InputError, "no more paper") if ranks.rank == 1 else (RankError, "Rank 1 on")
    try:
        next(federation.rounds(1))
        raise AssertionError("nothing was raised")
    except expected as error:
        require(words in str(error) and "no more paper" in str(error), f"the message is: {error}")
    federation.engine.inner.run_visits = visit
    try:
        federation.tensors()
        raise AssertionError("client state of an unfinished round was returned")
    except RankError:
        pass
    federation.restore(
        ranks.share({n: t for n, t in saved.items() if "memory" not in n}) | saved, 1
    )
    other = small_federation(Scaffold(), "vector", 2, 2)
    for _ in other.rounds(2):
        pass
    next(federation.rounds(1))
    require_close(federation.state.modes, other.state.modes, "after a failed round and a restore")


def a_loss_that_explodes(ranks):
    """Every rank raises the error that one process raises, with the same visit in it."""
    messages = []
    for federation in (small_federation(FedAvg(lr=1e308), "vector", 2, 2) for _ in range(2)):
        try:
            for _ in (federation if messages else distribute(federation, ranks)).rounds(3):
                pass
        except DivergedError as error:
            messages.append(str(error))
    require(len(messages) == 2 and messages[0] == messages[1], f"messages: {messages}")


def a_saved_federation(ranks, folder):
    """Two ranks save, and one process or two ranks continue; only rank 0 writes."""
    algorithm, data = Scaffold(), classification()
    whole = small_federation(algorithm, "vector", 2, 2)
    for _ in whole.rounds(4):
        pass
    first = distribute(small_federation(algorithm, "vector", 2, 2), ranks)
    for _ in first.rounds(2):
        pass
    path = first.save(folder / "first" / str(ranks.rank))
    require(path.exists() == (ranks.rank == 0), "only rank 0 writes")
    ranks.gather_messages({})
    for name, wrap in (("one", lambda made: made), ("two", lambda made: distribute(made, ranks))):
        resumed = wrap(Federation.load(folder / "first" / "0", model=small_model, data=data))
        for _ in resumed.rounds(2):
            pass
        require_close(resumed.state.modes, whole.state.modes, f"two ranks, then {name}")


def servers_that_round_differently(ranks):
    """Server updates may differ between devices; all ranks continue with that of rank 0."""
    exact = Middle.server_update

    def perturbed(self, mode, uploads, cohort):
        updated = exact(self, mode, uploads, cohort)
        return {**updated, "theta": updated["theta"] + 1e-3 * ranks.rank}

    alone, many = (
        small_federation(Middle(), "vector", 2, 2),
        distribute(small_federation(Middle(), "vector", 2, 2), ranks),
    )
    for _ in alone.rounds(2):
        pass
    Middle.server_update = perturbed
    try:
        for _ in many.rounds(2):
            pass
    finally:
        Middle.server_update = exact
    require_close(many.state.modes, alone.state.modes, "modes on which ranks agree")


def ranks_that_differ(ranks):
    """All ranks notice another seed on one of them, before anything is trained."""
    for seed, words in ((3, None), (3 + ranks.rank, "Ranks differ in config")):
        try:
            require(
                not check_ranks_agree(resolve({"seed": seed, "data": {"clients": 5}}), ranks),
                "the run is not done",
            )
            require(words is None, "ranks with different seeds met")
        except InputError as error:
            require(words is not None and words in str(error), f"the message is: {error}")


def main(folder):
    with job(timeout=60) as ranks:
        require(ranks.size > 1, "torchrun started one process only")
        passed = []
        for name, make in {
            **methods("loop"),
            **methods("vector"),
            **robust("vector"),
            **sharing("loop"),
            **sharing("vector"),
            **personal("loop"),
            **personal("vector"),
            **coupled(),
            **adaptive(),
            **joint(),
            **models(),
        }.items():
            agree_with_one_process(make, ranks)
            passed.append(name)
        one_client_per_round(ranks)
        bytes_on_a_simulated_clock(ranks)
        a_rank_that_fails(ranks)
        a_loss_that_explodes(ranks)
        a_saved_federation(ranks, folder)
        servers_that_round_differently(ranks)
        ranks_that_differ(ranks)
        (folder / f"passed-{ranks.rank}.json").write_text(json.dumps(passed))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
