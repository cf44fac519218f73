"""The battery catches what it is there for: deliberately broken algorithms, schedules and
engines.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest
import torch

from fedensemble import EMA, SWA, Algorithm, FedAvg, Plan, Schedule, Snapshots, Stratified, prng
from fedensemble.core.engine import engines
from fedensemble.core.sampling import sample_without_replacement
from fedensemble.engines.local.client_state import ClientMemory
from fedensemble.engines.local.loop import LoopEngine
from fedensemble.testing import check_algorithm, check_average, check_engine, check_schedule


@dataclass(frozen=True, kw_only=True)
class ReducesOverTheBatch(FedAvg):
    def local_training(self, sent, memory, problem):
        clip = lambda theta, gradient: gradient / gradient.norm().clamp(min=1.0)  # noqa: E731 (norm of all visits together)
        return {"theta": problem.descend(sent["theta"], clip)}, memory


@dataclass(frozen=True, kw_only=True)
class MixesModesOnTheServer(FedAvg):
    def server_update(self, mode, uploads, cohort):
        return {
            "theta": 0.9 * uploads["theta"]
            + 0.1 * uploads["theta"].mean(0, keepdim=uploads["theta"].dim() > 1)
        }


@dataclass(frozen=True, kw_only=True)
class MutatesSent(FedAvg):
    def local_training(self, sent, memory, problem):
        sent["theta"] -= 0.01
        return {"theta": problem.descend(sent["theta"])}, memory


@dataclass(frozen=True, kw_only=True)
class MutatesModes(FedAvg):
    def server_update(self, mode, uploads, cohort):
        return {"theta": mode["theta"].mul_(0.5).add_(0.5 * uploads["theta"])}


@dataclass(frozen=True, kw_only=True)
class MutatesMemory(FedAvg):
    def init_client_state(self, theta):
        return {"visits": torch.zeros_like(theta)}

    def local_training(self, sent, memory, problem):
        memory["visits"] += 1
        return {"theta": problem.descend(sent["theta"])}, memory


@dataclass(frozen=True, kw_only=True)
class RemembersOutsideMemory(FedAvg):
    """Keeps state in the algorithm: it is shared by clients and modes, and no checkpoint holds
    it.
    """

    calls: list = field(default_factory=list)

    def local_training(self, sent, memory, problem):
        self.calls.append(1)
        return {"theta": problem.descend(sent["theta"]) + 1e-3 * len(self.calls)}, memory


@dataclass(frozen=True, kw_only=True)
class ServerStateOutsideModes(FedAvg):
    """Momentum held by the object, per call: wrong after a checkpoint, and it reaches idle
    modes.
    """

    held: dict = field(default_factory=dict)

    def server_update(self, mode, uploads, cohort):
        if uploads["theta"].shape == self.held.get("v", uploads["theta"]).shape:
            self.held["v"] = 0.5 * self.held.get("v", 0) + uploads["theta"] - mode["theta"]
            return {"theta": mode["theta"] + self.held["v"]}
        self.held.pop("v")
        return {"theta": uploads["theta"]}


@dataclass(frozen=True, kw_only=True)
class SendsAllModes(FedAvg):
    def broadcast(self, mode):
        theta = mode["theta"]
        return {"theta": theta, "all": theta.flatten().expand(*theta.shape[:-1], -1)}


@dataclass(frozen=True, kw_only=True)
class DropsServerState(FedAvg):
    def init_mode(self, theta):
        return {"theta": theta, "v": torch.zeros_like(theta)}


@dataclass(frozen=True, kw_only=True)
class UploadsANumber(FedAvg):
    def local_training(self, sent, memory, problem):
        theta = problem.descend(sent["theta"])
        return {"theta": theta, "length": theta.norm(dim=-1)}, memory


@dataclass(frozen=True, kw_only=True)
class DrawsFromTorch(FedAvg):
    def local_training(self, sent, memory, problem):
        theta = problem.descend(sent["theta"])
        return {"theta": theta + 1e-3 * torch.randn_like(theta)}, memory


@dataclass(frozen=True, kw_only=True)
class TrainsInFloat32(FedAvg):
    def local_training(self, sent, memory, problem):
        return {"theta": problem.descend(sent["theta"]).float()}, memory


@dataclass(frozen=True, kw_only=True)
class DependsOnTheNumberOfModes(FedAvg):
    """Divides by the modes in the batch: right unbatched, wrong for an ensemble."""

    def server_update(self, mode, uploads, cohort):
        modes = len(mode["theta"]) if mode["theta"].dim() > 1 else 1
        return {"theta": mode["theta"] + (uploads["theta"] - mode["theta"]) / modes}


@dataclass(frozen=True, kw_only=True)
class CostsFractions(FedAvg):
    def upload_bytes(self, uploads, shared_draw):
        return shared_draw * 8


@dataclass(frozen=True, kw_only=True)
class PaysForModes(FedAvg):
    """Bytes may depend on the visit, but not on how many modes there are."""

    def download_bytes(self, sent, shared_draw):
        return 8 * len(sent["theta"])


@dataclass(frozen=True, kw_only=True)
class Couples(FedAvg):
    """Moves all modes towards their mean."""

    def couple(self, modes, buffers, cohort):
        theta = modes["theta"]
        return {"theta": 0.9 * theta + 0.1 * theta.mean(0)}, buffers


@dataclass(frozen=True, kw_only=True)
class CouplesInPlace(FedAvg):
    def couple(self, modes, buffers, cohort):
        return {"theta": modes["theta"].lerp_(modes["theta"].mean(0), 0.1)}, buffers


@dataclass(frozen=True, kw_only=True)
class CouplesAlsoInTheServersUpdate(Couples):
    """Mixes modes where each mode should be computed from its own clients."""

    def server_update(self, mode, uploads, cohort):
        theta = uploads["theta"]
        # K = 4 in the runs, never in the check of arithmetic
        return {"theta": theta + 0.1 * mode["theta"].flip(0) if len(theta) == 4 else theta}


@dataclass(frozen=True, kw_only=True)
class CouplesByCalls(FedAvg):
    calls: list = field(default_factory=list)

    def couple(self, modes, buffers, cohort):
        self.calls.append(1)
        return {"theta": modes["theta"] + 1e-3 * len(self.calls)}, buffers


@dataclass(frozen=True, kw_only=True)
class CouplesToOneMode(FedAvg):
    def couple(self, modes, buffers, cohort):
        return {"theta": modes["theta"].mean(0, keepdim=True)}, buffers[:1]


ALGORITHMS = [
    (CouplesInPlace, "wrote into"),
    (CouplesAlsoInTheServersUpdate, "leaks into other modes"),
    (CouplesByCalls, "another result for the same arguments"),
    (CouplesToOneMode, "must keep the form"),
    (PaysForModes, "depend on the number of modes"),
    (CostsFractions, "upload_bytes must give an int"),
    (ReducesOverTheBatch, "the same result alone"),
    (MixesModesOnTheServer, "the same result alone"),
    (MutatesSent, "local_training wrote into"),
    (MutatesModes, "server_update wrote into"),
    (MutatesMemory, "local_training wrote into"),
    (RemembersOutsideMemory, "the same result alone"),
    (ServerStateOutsideModes, "the same result|another run|disagrees"),
    (SendsAllModes, "number of modes|form|the same result"),
    (DropsServerState, "must keep the form"),
    (UploadsANumber, r"must be \[..., P\]"),
    (DrawsFromTorch, "the same result alone"),
    (TrainsInFloat32, "float64"),
    (DependsOnTheNumberOfModes, "the same result alone"),
]


@pytest.mark.parametrize(
    ("broken", "says"), ALGORITHMS, ids=lambda value: getattr(value, "__name__", "")
)
def test_algorithm(broken, says):
    with pytest.raises(AssertionError, match=says):
        check_algorithm(broken, "vector")


def test_algorithm_that_couples_modes():
    assert Couples.couples and not FedAvg.couples
    assert "coupling, engine 'loop'" in check_algorithm(Couples, "loop")


@dataclass(frozen=True, kw_only=True)
class Late(Algorithm):
    """Right on the first calls and wrong later, so that the cheap checks pass and those on whole
    runs must catch it.
    """

    wrong: str = ""
    seen: dict = field(default_factory=dict)

    def init_mode(self, theta):
        return {"theta": theta, "v": torch.zeros_like(theta)}

    def local_training(self, sent, memory, problem):
        return {"theta": problem.descend(sent["theta"])}, memory

    def server_update(self, mode, uploads, cohort):
        new = {"theta": uploads["theta"], "v": mode["v"] + 1}
        # K = 4 in the runs, never in the check of arithmetic
        if len(mode["theta"]) == 4 and self.wrong == "leak":
            new["theta"] = new["theta"] + 0.1 * mode["theta"].flip(0)
        if len(mode["theta"]) == 4 and self.wrong == "idle":
            mode["v"].add_(1.0)
        if self.wrong == "one mode" and mode["theta"].shape[0] == 1 and mode["theta"].dim() == 2:
            new["theta"] = 0.5 * new["theta"] + 0.5 * mode["theta"]
        if self.wrong == "calls" and len(mode["theta"]) == 4:
            self.seen["calls"] = self.seen.get("calls", 0) + 1
            new["v"] = new["v"] + self.seen["calls"]
        return new


def test_algorithm_with_server_state():
    check_algorithm(Late(), "loop")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("leak", "mode 3 leaks into other modes"),
        ("idle", "wrote into the state before it|leaks"),
        ("one mode", "not the method without ensemble"),
        ("calls", "disagrees|another run|round trip"),
    ],
)
def test_algorithm_that_is_wrong_only_in_whole_runs(wrong, says):
    with pytest.raises(AssertionError, match=says):
        check_algorithm(Late(wrong=wrong), "loop")


@dataclass(frozen=True, kw_only=True)
class TwoModesAClient(Stratified):
    def plan(self, state, round):
        plan = super().plan(state, round)
        client = plan.client.clone()
        client[1] = client[0]
        return Plan(
            client,
            torch.where(torch.arange(len(client)) == 1, (plan.mode[0] + 1) % self.modes, plan.mode),
        )


@dataclass(frozen=True, kw_only=True)
class OneVisitTooFew(Stratified):
    def plan(self, state, round):
        plan = super().plan(state, round)
        return plan.select(torch.arange(len(plan.client) - 1))


@dataclass(frozen=True, kw_only=True)
class Unsorted(Stratified):
    def plan(self, state, round):
        plan = super().plan(state, round)
        return plan.select(torch.arange(len(plan.client)).flip(0))


@dataclass(frozen=True, kw_only=True)
class CountsFromOne(Stratified):
    def plan(self, state, round):
        plan = super().plan(state, round)
        return Plan(plan.client, plan.mode + 1)


@dataclass(frozen=True, kw_only=True)
class ForgetsTheLastMode(Stratified):
    def plan(self, state, round):
        plan = super().plan(state, round)
        return Plan(plan.client, plan.mode.clamp(max=max(self.modes - 2, 0)))


@dataclass(frozen=True, kw_only=True)
class AlwaysTheFirstClients(Stratified):
    def plan(self, state, round):
        plan = super().plan(state, round)
        return Plan(torch.arange(len(plan.client)), plan.mode)


@dataclass(frozen=True, kw_only=True)
class AsManyFromEveryStratum(Stratified):
    """Strata differ by one client, which is enough: clients of a stratum of one are asked twice as
    often.
    """

    def plan(self, state, round):
        mode = self.permutations(state, round // self.modes)[:, round % self.modes]
        drawn = prng.bits(prng.key(int(state["seed"]), "clients", round), len(state["stratum"]))
        each, rest = divmod(self.clients_per_round, self.strata)
        room = torch.bincount(state["stratum"]) > each
        extra = torch.argsort(
            prng.bits(prng.key(0, "extra", round), self.strata).masked_fill(~room, (1 << 63) - 1)
        )
        share = torch.full((self.strata,), each).index_add(
            0, extra[:rest], torch.ones(rest, dtype=torch.int64)
        )
        client = torch.sort(sample_without_replacement(state["stratum"], drawn, share)).values
        return Plan(client, mode[state["stratum"][client]])


@dataclass(frozen=True, kw_only=True)
class PrefersSomeAndSaysSo(AsManyFromEveryStratum):
    uniform: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class EvenClientsLikeModeZero(Stratified):
    """Everybody is asked equally often, and all modes are trained alike, but not by the same
    clients.
    """

    def plan(self, state, round):
        plan = super().plan(state, round)
        order = torch.argsort(plan.client % 2, stable=True)
        mode = torch.empty_like(plan.mode)
        mode[order] = plan.mode.sort().values
        return Plan(plan.client, mode)


@dataclass(frozen=True, kw_only=True)
class IgnoresTheSeed(Stratified):
    def init(self, population, seed):
        return super().init(population, 0)


@dataclass(frozen=True, kw_only=True)
class DrawsPlansFromTorch(Stratified):
    def plan(self, state, round):
        plan = super().plan(state, round)
        return Plan(plan.client, torch.randint(self.modes, plan.mode.shape))


@dataclass(frozen=True, kw_only=True)
class CountsItsCalls(Stratified):
    def plan(self, state, round):
        state["seed"] += 1
        return super().plan(state, round)


@dataclass(frozen=True, kw_only=True)
class StateOfNumbers(Stratified):
    def init(self, population, seed):
        return {**super().init(population, seed), "seed": seed}


@dataclass(frozen=True, kw_only=True)
class RefusesEverything(Stratified):
    def check(self, population):
        super().check(0)


SCHEDULES = [
    (TwoModesAClient, "two modes in one round|same mode twice"),
    (OneVisitTooFew, "must have 8 visits"),
    (Unsorted, "sorted by client"),
    (CountsFromOne, "a mode is outside"),
    (ForgetsTheLastMode, "must be treated alike"),
    (AlwaysTheFirstClients, "different seeds|must be treated alike"),
    (
        AsManyFromEveryStratum,
        r"is selected in .* % of \d+ rounds where the mean is .* must be treated alike",
    ),
    (EvenClientsLikeModeZero, r"trains mode \d in .* must be treated alike"),
    (IgnoresTheSeed, "different seeds"),
    (DrawsPlansFromTorch, "function of state and round alone"),
    (CountsItsCalls, "wrote into the state"),
    (StateOfNumbers, "dict of tensors"),
    (RefusesEverything, "rejects every ordinary setting"),
]


@pytest.mark.parametrize(
    ("broken", "says"), SCHEDULES, ids=lambda value: getattr(value, "__name__", "")
)
def test_schedule(broken, says):
    assert issubclass(broken, Schedule)
    with pytest.raises(AssertionError, match=says):
        check_schedule(broken)


def test_schedule_may_prefer_clients_and_say_so():
    check_schedule(PrefersSomeAndSaysSo)


class ForgetsBuffers(LoopEngine):
    def run_visits(self, algorithm, sent, buffers, plan, round):
        return super().run_visits(algorithm, sent, buffers, plan, round)._replace(buffers=buffers)


class ForgetsMemory(LoopEngine):
    def load_client_state(self, tensors):
        pass


class OneRowAClient(ClientMemory):
    def read(self, plan, fresh):
        return super().read(Plan(plan.client, torch.zeros_like(plan.mode)), fresh)

    def write_all(self, kept):
        super().write_all(
            [(Plan(plan.client, torch.zeros_like(plan.mode)), rows) for plan, rows in kept]
        )


class SharesMemoryBetweenModes(LoopEngine):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.memory = OneRowAClient()


class AnotherOrderOfBatches(LoopEngine):
    def prepare(self, algorithm, sent, mode, buffers, plan, round):
        return super().prepare(algorithm, sent, mode, buffers, plan, round + 1)


class SkipsTheLastStep(LoopEngine):
    def __init__(self, model, data, work, seed):
        super().__init__(
            model,
            data,
            replace(work, last_batch="drop") if work.last_batch == "keep" else work,
            seed,
        )


class WritesIntoSent(LoopEngine):
    def run_visits(self, algorithm, sent, buffers, plan, round):
        returned = super().run_visits(algorithm, sent, buffers, plan, round)
        sent["theta"].zero_()
        return returned


class DoesNotTellTheRound(LoopEngine):
    def run_visits(self, algorithm, sent, buffers, plan, round):
        returned = super().run_visits(algorithm, sent, buffers, plan, round)
        return returned._replace(cohort=replace(returned.cohort, round=0))


ENGINES = [
    (DoesNotTellTheRound, "must fill in the cohort's round and lr"),
    (ForgetsBuffers, "on BatchNorm"),
    (ForgetsMemory, "loses client memory"),
    (SharesMemoryBetweenModes, "client memory"),
    (AnotherOrderOfBatches, "disagrees with 'loop'"),
    (SkipsTheLastStep, "disagrees with 'loop'"),
    (WritesIntoSent, "wrote into what it was given"),
]


@pytest.mark.parametrize(
    ("broken", "says"), ENGINES, ids=lambda value: getattr(value, "__name__", "")
)
def test_engine(broken, says, monkeypatch):
    monkeypatch.setitem(engines._items, "broken", broken)
    with pytest.raises(AssertionError, match=says):
        check_engine("broken")


@dataclass(frozen=True, kw_only=True)
class CountsIdleModes(EMA):
    def update(self, state, theta, buffers, trained, round, lr):
        return super().update(state, theta, buffers, torch.ones_like(trained), round, lr)


@dataclass(frozen=True, kw_only=True)
class KeepsTheStart(EMA):
    def init(self, theta, buffers):
        state = super().init(theta, buffers)
        return {**state, "ema": torch.zeros_like(theta)}


@dataclass(frozen=True, kw_only=True)
class WritesToItsState(EMA):
    def update(self, state, theta, buffers, trained, round, lr):
        state["ema"].mul_(0.9).add_(0.1 * theta * trained.unsqueeze(1))
        return state


@dataclass(frozen=True, kw_only=True)
class MixesModes(SWA):
    def add_models(self, state, theta, buffers, count):
        return super().add_models(state, theta - 0.1 * theta.mean(0), buffers, count)


@dataclass(frozen=True, kw_only=True)
class WritesToTheModes(SWA):
    def update(self, state, theta, buffers, trained, round, lr):
        theta *= 0.999
        return super().update(state, theta, buffers, trained, round, lr)


@dataclass(frozen=True, kw_only=True)
class RemembersOutsideItsState(Snapshots):
    rounds: list = field(default_factory=list)

    def update(self, state, theta, buffers, trained, round, lr):
        self.rounds.append(round)
        return super().update(state, theta * len(self.rounds), buffers, trained, round, lr)


@dataclass(frozen=True, kw_only=True)
class DrawsFreshSamples(EMA):
    def predictors(self, state, theta, buffers, seed):
        found = super().predictors(state, theta, buffers, seed)
        return found._replace(theta=found.theta + torch.rand_like(found.theta))


@dataclass(frozen=True, kw_only=True)
class GrowsItsState(Snapshots):
    def update(self, state, theta, buffers, trained, round, lr):
        return {**state, "all": torch.cat([state.get("all", theta[:, :0]), theta], 1)}


@pytest.mark.parametrize(
    ("average", "says"),
    [
        (CountsIdleModes(), "A mode without clients changes its average"),
        (KeepsTheStart(), "A mode that was never trained is not its own average"),
        (WritesToItsState(), "wrote to an argument|Two equal calls of update differ"),
        (MixesModes(start=0), "depends on other modes"),
        (WritesToTheModes(start=0), "wrote to an argument|Two equal calls of update differ"),
        (RemembersOutsideItsState(), "Two equal calls of update differ"),
        (DrawsFreshSamples(), "Two equal calls of predictors differ"),
        (GrowsItsState(), "changes names, shapes or dtypes"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_broken_averages_are_caught(average, says):
    with pytest.raises(AssertionError, match=says):
        check_average(average)
