"""Client state: its placement does not change results, and a failed write is rolled back."""

import errno
import os
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedensemble.algorithms import Scaffold
from fedensemble.checkpoint_file import read_checkpoint, write_checkpoint
from fedensemble.core.types import Plan
from fedensemble.engines.local import client_state as module
from fedensemble.engines.local.client_state import ClientMemory
from fedensemble.errors import InputError, StoreError
from fedensemble.testing.engine import check_memory
from fedensemble.testing.toy_problems import classification, small_federation, small_model, train

PLACEMENTS = ("auto", "device", "host", "disk")


def plan_of(visits):
    client, mode = torch.tensor(visits).T
    return Plan(client, mode)


@settings(max_examples=60, deadline=None)
@given(
    rounds=st.lists(
        st.lists(
            st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=12, unique=True
        ),
        max_size=8,
    ),
    place=st.sampled_from(PLACEMENTS),
)
def test_behaves_like_a_dictionary(rounds, place):
    memory, expected, count = ClientMemory(placement=place), {}, 0
    for visits in rounds:
        new = torch.arange(count, count + 2 * len(visits), dtype=torch.float32).reshape(-1, 2)
        count += 2 * len(visits)
        half = len(visits) // 2  # two blocks
        parts = [part for part in (slice(0, half), slice(half, None)) if visits[part]]
        memory.write_all(
            [
                (plan_of(visits[part]), {"h": new[part], "n": new[part, :1].double()})
                for part in parts
            ]
        )
        expected |= {visit: row.tolist() for visit, row in zip(visits, new, strict=True)}
        every = [(client, mode) for client in range(10) for mode in range(4)]
        fresh = {
            "h": torch.full((40, 2), -1.0),
            "n": torch.full((40, 1), -1.0, dtype=torch.float64),
        }
        got = memory.read(plan_of(every), fresh)
        assert got["h"].tolist() == [expected.get(visit, [-1.0, -1.0]) for visit in every]
        assert got["n"].tolist() == [expected.get(visit, [-1.0])[:1] for visit in every]
    other = ClientMemory(placement="host")
    other.load(memory.tensors())
    assert len(other) == len(memory) == len(expected)
    assert {
        tuple(visit) for visit in memory.tensors().get("visits", torch.empty(0, 2)).tolist()
    } == set(expected)
    assert all(
        torch.equal(other.tensors()[name], tensor) for name, tensor in memory.tensors().items()
    )


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_every_placement_gives_the_same_bits(engine):
    def trained(place):
        federation = small_federation(
            Scaffold(lr=0.1), engine, 3, 2, engine_options={"client_memory": place}
        )
        return train(federation, 6)

    first = trained("auto").tensors()
    assert len(first["memory/visits"]) > 6
    for place in PLACEMENTS[1:]:
        federation = trained(place)
        assert federation.engine.memory.where == ("disk" if place == "disk" else "host")
        got = federation.tensors()
        assert set(got) == set(first)
        assert all(torch.equal(got[name], value) for name, value in first.items())


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_contract_with_client_state_on_disk(engine):
    check_memory(engine, {"client_memory": "disk"})


def test_resumes_with_any_placement(tmp_path):
    from fedensemble import Federation

    first = train(
        small_federation(
            Scaffold(lr=0.1), "vector", 2, 2, engine_options={"client_memory": "disk"}
        ),
        3,
    )
    first.save(tmp_path)
    options = [{"client_memory": place} for place in PLACEMENTS]
    others = [
        Federation.load(tmp_path, model=small_model, data=classification(), engine_options=o)
        for o in options
    ]
    train(first, 3)
    for other in others:
        train(other, 3)
        assert all(
            torch.equal(other.tensors()[name], value) for name, value in first.tensors().items()
        )


def test_auto_goes_to_disk_when_the_host_is_full(monkeypatch):
    monkeypatch.setattr(module, "free_bytes", lambda device: 4000)
    memory = ClientMemory()
    places = []
    for client in range(8):
        memory.write(plan_of([(client, 0)]), {"h": torch.full((1, 100), float(client))})
        places.append(memory.where)
    assert places[0] == "host"
    assert places[-1] == "disk"
    read = memory.read(
        plan_of([(client, 0) for client in range(9)]), {"h": torch.full((9, 100), -1.0)}
    )
    assert read["h"][:, 0].tolist() == [*map(float, range(8)), -1.0]


def test_a_full_disk_raises_and_changes_nothing(monkeypatch):
    memory = ClientMemory(placement="disk")
    memory.write(plan_of([(0, 0)]), {"h": torch.ones(1, 3), "g": torch.ones(1, 3)})
    before = {name: value.clone() for name, value in memory.tensors().items()}
    calls = []

    def full(descriptor, start, size):
        calls.append(size)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(module.mmap, "mmap", lambda number, size: bytearray(size))
    rows = {"h": torch.zeros(2, 3), "g": torch.zeros(2, 3)}
    with pytest.raises(StoreError, match=r"Client state needs .* GiB in .*No space left.*TMPDIR"):
        memory.write(plan_of([(0, 0), (1, 0)]), rows)
    assert len(calls) == 2
    assert len(memory) == 1
    assert torch.equal(memory.tensors()["visits"], before["visits"])


def test_unknown_placement():
    with pytest.raises(
        InputError, match="client_memory is 'auto', 'device', 'host' or 'disk'; got 'moon'"
    ):
        small_federation(Scaffold(lr=0.1), "loop", 2, 2, engine_options={"client_memory": "moon"})


def test_the_file_is_not_visible_in_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    memory = ClientMemory(placement="disk")
    memory.write(plan_of([(0, 0)]), {"h": torch.ones(1, 3)})
    assert memory.tensors()["row.h"].tolist() == [[1.0, 1.0, 1.0]]
    assert list(tmp_path.iterdir()) == []


def test_checkpoint_of_large_client_state_is_streamed(tmp_path):
    memory = ClientMemory(placement="disk")
    memory.write(plan_of([(0, 0), (1, 0)]), {"h": torch.ones(2, 8_000_000)})  # 64 MB
    tracemalloc.start()
    write_checkpoint(tmp_path / "a", memory.tensors(), {})
    tensors, _ = read_checkpoint(tmp_path / "a")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 8_000_000
    assert torch.equal(tensors["row.h"], memory.tensors()["row.h"])
