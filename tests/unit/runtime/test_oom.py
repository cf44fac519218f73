"""Out of memory: blocks are halved, no visit is counted twice, and errors say what does not fit."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

from fedensemble import EngineWarning, FederatedData, Federation, InputError
from fedensemble.algorithms import FedAvg, Scaffold
from fedensemble.core.mode_means import ModeMeans
from fedensemble.core.types import Plan
from fedensemble.engines.local.client_state import ClientMemory
from fedensemble.engines.local.local_engine import LocalEngine
from fedensemble.engines.local.run_accumulator import RunAccumulator
from fedensemble.engines.local.run_visits import run_visits
from fedensemble.engines.local.vector import VectorEngine
from fedensemble.runtime.oom import memory_report, out_of_memory
from fedensemble.testing.assertions import require_close
from fedensemble.testing.toy_problems import classification, small_federation, train

ROUNDS = 3
FULL = (
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 40000000000 bytes. "
    "Error code 12"
)
ERRORS = {
    "CUDA": lambda: torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."
    ),
    "CPU": lambda: RuntimeError(f"[enforce fail at alloc_cpu.cpp:127] err == 0. {FULL}"),
    "Python": MemoryError,
}
PLACES = {
    "prepare": (LocalEngine, "prepare", lambda self, algorithm, sent, mode, *others: len(mode)),
    "train": (
        LocalEngine,
        "train_eager",
        lambda self, algorithm, given, ragged: len(given.model_key),
    ),
    "judge": (RunAccumulator, "add", lambda self, block, trained: len(block.modes)),
    "aside": (ClientMemory, "stage", lambda self, rows: len(rows["c"])),
    "sums": (ModeMeans, "add", lambda self, mode, *others: len(mode)),
}


def made(engine="vector", **options):
    return small_federation(Scaffold(lr=0.1), engine, 2, 2, **options)


def limit_memory(monkeypatch, place, most, error=ERRORS["CUDA"]):
    """Makes a function fail for more than `most` visits; returns the sizes of its calls."""
    owner, name, size = PLACES[place]
    real, sizes = getattr(owner, name), []

    def limited(*args, **options):
        sizes.append(size(*args, **options))
        if sizes[-1] > most:
            raise error()
        return real(*args, **options)

    monkeypatch.setattr(owner, name, limited)
    return sizes


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("place", PLACES)
def test_smaller_blocks_give_the_same(monkeypatch, place, error):
    expected = train(made(), ROUNDS)
    sizes = limit_memory(monkeypatch, place, 2, ERRORS[error])
    with pytest.warns(
        EngineWarning, match=r"Out of memory in round 1.*: from there on 2 visits .* instead of 4"
    ):
        got = train(made(), ROUNDS)
    assert got.engine.block == 2
    assert got.engine.blocks == [(0, expected.engine.block), (0, 2)]
    assert sizes == [4, 2, 2] + [2, 2] * (ROUNDS - 1)  # the smaller block is kept
    require_close(got.tensors(), expected.tensors(), f"{place} without memory")


@pytest.mark.parametrize("engine", ["loop", "vector"])
@pytest.mark.parametrize("place", PLACES)
def test_one_visit_that_does_not_fit_raises_and_is_rolled_back(monkeypatch, place, engine):
    federation = train(made(engine), 1)
    before = {name: value.clone() for name, value in federation.tensors().items()}
    with monkeypatch.context() as patched:
        limit_memory(patched, place, 0, ERRORS["CPU"])
        report = r"\(37.3 GiB requested, .* GiB free\): lower"
        with pytest.raises(
            InputError, match=f"One visit does not fit into the memory of cpu {report}"
        ):
            next(federation.rounds(1))
    assert federation.round == 1
    assert all(torch.equal(value, before[name]) for name, value in federation.tensors().items())
    assert next(federation.rounds(1)).round == 2


@dataclass(frozen=True, kw_only=True)
class Gathering(FedAvg):
    gathers: ClassVar[bool] = True


def test_each_upload_is_gathered_once(monkeypatch):
    federation = small_federation(Gathering(lr=0.1), "vector", 2, 2)
    limit_memory(monkeypatch, "sums", 2)
    request = federation.next_request()
    members = federation.engine.run_visits(*request).cohort.members
    assert sorted(members.client.tolist()) == sorted(request.plan.client.tolist())
    assert len(members.uploads["theta"]) == 4


def test_other_errors_are_not_retried(monkeypatch):
    sizes = limit_memory(monkeypatch, "train", 2, lambda: RuntimeError("a mistake"))
    with pytest.raises(RuntimeError, match="a mistake"):
        train(made(), 1)
    assert sizes == [4]


def test_a_block_that_one_of_several_runs_has_added_is_not_added_again(monkeypatch):
    runs, apart = ([made(seed=seed) for seed in (1, 2)] for _ in range(2))
    trained = limit_memory(monkeypatch, "train", 100)
    real, calls = RunAccumulator.add, []

    def take(self, block, trained):
        calls.append(len(block.modes))
        if len(calls) == 2:  # of the first block, the second run's part
            raise torch.OutOfMemoryError("CUDA out of memory")
        real(self, block, trained)

    with monkeypatch.context() as patched:
        patched.setattr(RunAccumulator, "add", take)
        requests = [run.next_request() for run in runs]
        answers = run_visits([run.engine for run in runs], requests)
    assert trained == [8, 4]
    assert calls == [4, 4, 4]
    for run, answer, other in zip(runs, answers, apart, strict=True):
        run.run_round(answer)
        require_close(run.tensors(), train(other, 1).tensors(), "Runs that train together")


def test_client_state_is_unchanged_after_a_round_whose_means_do_not_fit(monkeypatch):
    federation = train(made(), 1)
    before = {
        name: value.clone() for name, value in federation.engine.client_state_tensors().items()
    }

    def full(self):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ModeMeans, "mean", full)
    with pytest.raises(torch.OutOfMemoryError):
        next(federation.rounds(1))
    assert all(
        torch.equal(value, before[name])
        for name, value in federation.engine.client_state_tensors().items()
    )


@pytest.mark.parametrize("visits", [1, 3])
def test_adding_a_block_to_the_sums_is_all_or_nothing(visits):
    mode, weight = torch.arange(visits) % 2, torch.ones(visits)
    good = {"a": torch.ones(visits, 2), "b": torch.ones(visits, 3)}
    bad = {"a": torch.ones(visits, 2), "b": torch.ones(0, 3)}  # fails after "a"
    means = ModeMeans(2)
    for _ in range(2):  # before the first block, and after it
        with pytest.raises((RuntimeError, IndexError)):
            means.add(mode, weight, bad)
        means.add(mode, weight, good)
    assert means.count.sum() == means.weight.sum() == 2 * visits
    assert means.sums["a"].sum() == 2 * 2 * visits
    assert means.sums["b"].sum() == 2 * 3 * visits


def test_a_failed_prefetch_is_retried_later(monkeypatch):
    federation = made()
    plan = Plan(torch.tensor([0, 1]), torch.tensor([0, 0]))

    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(LocalEngine, "_make_batch_plan", full)
        federation.engine.prefetch(plan, 0)
    assert federation.engine._prefetched is None
    federation.engine.prefetch(plan, 0)
    assert federation.engine._prefetched is not None


def full(*args, **options):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has ...")


def test_data_that_do_not_fit(monkeypatch):
    monkeypatch.setattr(FederatedData, "to", full)
    with pytest.raises(
        InputError, match=r"The clients' data, .* GiB, do not fit .*\(0.02 GiB requested.*uint8"
    ):
        made()


def test_a_model_that_does_not_fit():
    class Large(nn.Linear):
        def forward(self, x):
            full()

    with pytest.raises(InputError, match=r"there is not enough memory \(0.02 GiB requested"):
        Federation(lambda: Large(4, 3), classification())


def test_a_step_that_does_not_fit():
    class Large(nn.Linear):
        def forward(self, x):
            return full() if self.training else super().forward(x)

    with pytest.raises(
        InputError, match="A step on 2 examples does not fit into the memory of cpu"
    ):
        Federation(lambda: Large(4, 3), classification())


def test_a_check_that_does_not_fit(monkeypatch):
    monkeypatch.setattr("fedensemble.engines.local.vector.check_stackable", full)
    with pytest.raises(
        InputError,
        match="A check of the model on a few examples does not fit into the memory of cpu",
    ):
        made()


def test_an_evaluation_that_does_not_fit(monkeypatch):
    federation = made()
    x = classification().x
    monkeypatch.setattr(type(federation.model), "outputs", full)
    with pytest.raises(
        InputError, match=r"Evaluation in batches of 7 does not fit .*lower batch_size"
    ):
        federation.ensemble.predict(x, batch_size=7)


@pytest.mark.parametrize("place", ["auto", "host"])
def test_client_state_moves_to_disk_if_the_host_is_full(monkeypatch, place):
    expected = train(made(), ROUNDS).tensors()
    real = ClientMemory._new

    def limited(self, name, count, like):
        return full() if self.where == "host" and count > 4 else real(self, name, count, like)

    monkeypatch.setattr(ClientMemory, "_new", limited)
    federation = made(engine_options={"client_memory": place})
    if place == "host":
        with pytest.raises(
            InputError, match=r"Client state does not fit into the memory of cpu .*'disk'"
        ):
            train(federation, ROUNDS)
        return
    got = train(federation, ROUNDS)
    assert got.engine.memory.where == "disk"
    assert all(torch.equal(value, expected[name]) for name, value in got.tensors().items())


def test_which_errors_are_out_of_memory_errors():
    assert all(out_of_memory(error()) for error in ERRORS.values())
    assert out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert not out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not out_of_memory(ValueError("out of memory"))
    assert "2.0 GiB requested" in memory_report(ERRORS["CUDA"](), torch.device("cuda"))


def test_shrinking_frees_captured_graphs():
    federation = small_federation(FedAvg(), "vector", 2, 2)
    engine = federation.engine
    assert isinstance(engine, VectorEngine)
    engine._captured["a shape"] = object()
    engine.block = 5
    engine.halve_block_size(4, "", round=2)
    assert engine.notes[-1].startswith("Out of memory in round 3: from there on 2 visits")
    assert engine.block == 2
    assert not engine._captured
