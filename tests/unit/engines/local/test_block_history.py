"""The block size is the same at every start, recorded, and kept when a run is resumed."""

import json
from types import SimpleNamespace

import pytest
import torch

from fedensemble import EngineWarning, FedAvg, Federation
from fedensemble.algorithms import IFCA
from fedensemble.config.schema import resolve
from fedensemble.engines.distributed.engine import DistributedEngine
from fedensemble.engines.distributed.process_group import ProcessGroup
from fedensemble.engines.local import block_size
from fedensemble.engines.local.block_size import max_block_size
from fedensemble.engines.local.local_engine import LocalEngine
from fedensemble.engines.local.vector import VectorEngine
from fedensemble.experiment.run import run
from fedensemble.testing.toy_problems import classification, small_federation, train

GIB = 1 << 30
TOTAL = 80 * GIB


class FakeGPU:
    """Fakes the memory statistics of a GPU with `own` bytes in use here and `others` elsewhere."""

    def __init__(self, monkeypatch, own=GIB, others=0, cached=0):
        statistics = {
            "mem_get_info": (TOTAL - own - cached - others, TOTAL),
            "memory_allocated": own,
            "memory_reserved": own + cached,
        }
        for name, value in statistics.items():
            monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
        monkeypatch.setattr(block_size, "activations", lambda engine: GIB - 10 * 400)
        layout = SimpleNamespace(total=100)
        model = SimpleNamespace(
            device=torch.device("cuda"), theta_layout=layout, dtype=torch.float32
        )
        self.engine = SimpleNamespace(model=model, notes=[])

    def block(self, budget=None):
        return max_block_size(self.engine, budget)


@pytest.mark.parametrize("others", [0, 3, 20, 30])
@pytest.mark.parametrize("cached", [0, 5])
def test_other_programs_on_the_gpu_do_not_change_the_block(monkeypatch, others, cached):
    gpu = FakeGPU(monkeypatch, others=others * GIB, cached=cached * GIB if others < 30 else 0)
    assert gpu.block() == 40  # 60 % of 79 visits of one GiB, rounded down to three binary digits
    assert gpu.engine.notes == []


def test_a_gpu_filled_by_others_adds_a_note(monkeypatch):
    gpu = FakeGPU(monkeypatch, others=69 * GIB)
    assert gpu.block() == 6
    assert len(gpu.engine.notes) == 1
    assert "Other programs leave only 10.0 GiB of the 80.0 GiB of cuda" in gpu.engine.notes[0]
    assert gpu.block(budget=3.5) == 3  # a budget of the user is taken as it is


def test_noise_in_the_measured_memory_does_not_change_the_block(monkeypatch):
    gpu = FakeGPU(monkeypatch)
    sizes = set()
    for percent in (99, 100, 102, 104):
        monkeypatch.setattr(
            block_size, "activations", lambda engine, percent=percent: GIB * percent // 100
        )
        sizes.add(gpu.block())
    assert sizes == {40}


def set_max_block_size(monkeypatch, visits):
    """Patches the engine so that this many visits fit into memory."""
    monkeypatch.setattr(
        "fedensemble.engines.local.vector.max_block_size", lambda engine, memory: visits
    )


def model():
    return torch.nn.Linear(4, 3)


def made(**options):
    return Federation(
        model, classification(), FedAvg(lr=0.1), modes=2, strata=2, clients_per_round=4, **options
    )


def test_a_loaded_federation_keeps_its_block(monkeypatch, tmp_path):
    set_max_block_size(monkeypatch, 3)
    federation = train(made(), 2)
    federation.save(tmp_path)
    set_max_block_size(monkeypatch, 2)
    loaded = Federation.load(tmp_path, model=model, data=federation.data)
    assert (loaded.engine.block, loaded.engine.blocks) == (3, [(0, 3)])
    train(federation, 3)
    train(loaded, 3)
    assert all(
        torch.equal(value, loaded.tensors()[name]) for name, value in federation.tensors().items()
    )


def test_a_block_or_an_engine_set_by_the_user_wins(monkeypatch, tmp_path):
    set_max_block_size(monkeypatch, 3)
    made().save(tmp_path)
    set_max_block_size(monkeypatch, 2)
    data = classification()
    assert (
        Federation.load(tmp_path, model=model, data=data, engine_options={"block": 4}).engine.block
        == 4
    )
    assert Federation.load(tmp_path, model=model, data=data, engine_options={}).engine.block == 2
    assert Federation.load(tmp_path, model=model, data=data, engine="loop").engine.block == 1


def test_block_sizes_of_old_files_and_other_devices_are_ignored(monkeypatch):
    set_max_block_size(monkeypatch, 3)
    federation = made()
    federation.restore(federation.tensors(), 0)  # as older versions saved it
    assert federation.engine.block == 3
    for rows in (
        {"blocks.cuda": torch.tensor([[0, 0, 9]])},
        {"blocks.cpu": torch.tensor([[0, 0, 9], [1, 0, 9]])},
    ):
        federation.engine.load_numerics(rows)
        assert federation.engine.block == 3


def limit_memory(monkeypatch, most, from_round=0):
    """Lets blocks of more than `most` visits run out of memory from a round on."""
    real, rounds = LocalEngine.prepare, []

    def prepare(self, algorithm, sent, mode, buffers, plan, round):
        rounds.append(round)
        if len(mode) > most and round >= from_round:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, algorithm, sent, mode, buffers, plan, round)

    monkeypatch.setattr(LocalEngine, "prepare", prepare)


def test_a_block_size_reduced_after_oom_is_kept(monkeypatch, tmp_path):
    federation = small_federation(FedAvg(), "vector", 2, 2, engine_options={"block": 4})
    limit_memory(monkeypatch, 2, from_round=1)
    with pytest.warns(EngineWarning, match="Out of memory in round 2.* instead of 4"):
        train(federation, 3)
    again = small_federation(FedAvg(), "vector", 2, 2, engine_options={"block": 4})
    again.restore(federation.checkpoint_tensors(), 3)
    assert again.engine.blocks == [(0, 4), (1, 2)]
    assert again.engine.block == 2


CONFIG = {
    "name": "blocks",
    "rounds": 4,
    "data": {"clients": 12},
    "ensemble": {"modes": 2, "clients_per_round": 6},
    "engine": {"device": "cpu"},
}


@pytest.mark.filterwarnings("ignore::fedensemble.errors.EngineWarning")
def test_a_run_records_its_blocks_and_keeps_them(monkeypatch, tmp_path):
    config = resolve(CONFIG)
    set_max_block_size(monkeypatch, 5)
    whole = run(config, tmp_path / "whole")
    assert whole["blocks"] == [[0, 5]]

    rounds = Federation.rounds

    def interrupted(self, count):
        if self.round == 2:
            raise KeyboardInterrupt
        return rounds(self, count)

    monkeypatch.setattr(Federation, "rounds", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "parts", checkpoint_seconds=0)
    monkeypatch.setattr(Federation, "rounds", rounds)
    set_max_block_size(monkeypatch, 2)  # the second start finds less memory
    parts = run(config, tmp_path / "parts")
    assert parts["blocks"] == [[0, 5]]
    assert json.loads((tmp_path / "parts" / "env.json").read_text())["blocks"] == [[0, 5]]
    modes = [(tmp_path / name / "modes.safetensors").read_bytes() for name in ("parts", "whole")]
    assert modes[0] == modes[1]


class TwoRanks(ProcessGroup):
    """One of two ranks, without the other."""

    def __init__(self, rank):
        super().__init__()
        self.rank, self.size = rank, 2

    def gather(self, tensors):
        return dict(tensors)


def test_every_rank_keeps_its_own_block(monkeypatch):
    engines = []
    for rank, visits in enumerate((3, 5)):
        set_max_block_size(monkeypatch, visits)
        engines.append(DistributedEngine(made().engine, TwoRanks(rank)))
    rows = torch.cat([engine.numerics()["blocks.cpu"] for engine in engines])
    assert rows.tolist() == [[0, 0, 3], [1, 0, 5]]
    for engine in engines:
        engine.inner.block = 1
        engine.load_numerics({"blocks.cpu": rows})
    assert [engine.inner.block for engine in engines] == [3, 5]
    alone = made().engine
    assert isinstance(alone, VectorEngine)
    alone.load_numerics({"blocks.cpu": rows})  # ignored: sums over ranks differ anyway
    assert alone.block == 5


def test_half_of_the_joint_visits_train_after_oom(monkeypatch):
    """A joint visit takes the memory of as many visits as there are modes."""
    federations = [
        small_federation(IFCA(), "vector", 3, 1, engine_options={"block": 12}) for _ in range(2)
    ]
    train(federations[0], 2)
    limit_memory(monkeypatch, 2)
    with pytest.warns(EngineWarning, match="6 visits are trained at once instead of 12"):
        train(federations[1], 2)
    assert federations[1].engine.block == 6  # two clients
    one, other = (federation.tensors() for federation in federations)
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
