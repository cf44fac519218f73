"""A run with more rounds continues a shorter one, and ends with the bytes of a run that was not
interrupted.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedensemble import durable
from fedensemble.config.schema import Config, resolve
from fedensemble.errors import StoreError
from fedensemble.experiment.evaluation import TEST_KEYS
from fedensemble.experiment.extension import find_extendable
from fedensemble.experiment.run import RunCallbacks, run
from fedensemble.experiment.storage.run_folder import RunFolder
from fedensemble.experiment.studies.compare import compare, make_comparison, run_folder

from .simulated_disk import QuickDisk, SimulatedDisk, Tree, frozen, read_tree, write_tree

SETTINGS: dict[str, Any] = {
    "data": {"source": "gaussians", "n": 60, "n_test": 10, "classes": 3, "clients": 6},
    "model": {"name": "mlp", "hidden": [3], "dropout": 0.2},
    # With client state, a learning rate that changes within the run, and averages over rounds.
    "algorithm": {"name": "scaffold", "lr_decay": 0.9, "lr_decay_every": 2},
    "average": {"name": "snapshots", "count": 2},
    "ensemble": {"modes": 3, "strata": 3, "clients_per_round": 3},
    "evaluation": {"every": 3, "dropout": True},
    "engine": {"device": "cpu"},
}
EARLIER = Path(__file__).parents[2] / "data" / "earlier_version" / "run"


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch):
    monkeypatch.setattr(durable, "disk", QuickDisk())


def config(rounds: int, **changes: Any) -> Config:
    return resolve({**SETTINGS, **changes, "rounds": rounds})


def final_bytes(folder: Path) -> Tree:
    """All files of a finished run but times, and the checkpoint before the last."""
    tree = read_tree(folder)
    summary = json.loads(tree["summary.json"] or b"")
    del summary["seconds"]
    checksums = json.loads(tree["checksums.json"] or b"")
    del checksums["summary.json"]
    last = f"checkpoint/round-{summary['rounds']:08d}.safetensors"
    return {
        name: content
        for name, content in tree.items()
        if not name.startswith("checkpoint/") or name == last
    } | {"summary.json": repr(summary).encode(), "checksums.json": repr(checksums).encode()}


def started_after(config: Config, folder: Path, **options: Any) -> int:
    """Carries a run to its end, and returns the round after which it began."""
    rounds = [config.rounds]
    callbacks = RunCallbacks(on_train_start=lambda config, round: rounds.append(round))
    run(config, folder, callbacks, checkpoint_seconds=0, **options)
    return rounds[-1]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    run(config(6), folder)
    return final_bytes(folder)


def test_the_same_folder(tmp_path, uninterrupted):
    """From 4 to 6 rounds: round 4 is tested in the shorter run only."""
    run(config(4), tmp_path / "run")
    assert "test" in RunFolder(tmp_path / "run").metrics()[3]
    assert started_after(config(6), tmp_path / "run") == 4
    assert "test" not in RunFolder(tmp_path / "run").metrics()[3]
    assert final_bytes(tmp_path / "run") == uninterrupted
    assert {*TEST_KEYS} - {"test_new_clients", "test_own"} <= set(
        RunFolder(tmp_path / "run").metrics()[5]
    )


def test_a_folder_of_its_own(tmp_path, uninterrupted):
    """The shorter run is kept, byte for byte."""
    short, long = run_folder(config(4), tmp_path), run_folder(config(6), tmp_path)
    run(config(4), short)
    before = read_tree(short)
    shorter = find_extendable(config(6), long.parent)
    assert [path.name for path in shorter] == ["round-00000004.safetensors"]
    assert started_after(config(6), long, extendable=shorter) == 4
    assert final_bytes(long) == uninterrupted and read_tree(short) == before


def test_an_extension_that_is_interrupted_is_resumed(tmp_path, uninterrupted):
    def stop(report, metrics):
        raise ZeroDivisionError

    def interrupt(folder: Path, shorter: list[Path]) -> None:
        callbacks = RunCallbacks(on_round_end=stop)
        with pytest.raises(ZeroDivisionError):
            run(config(6), folder, callbacks, checkpoint_seconds=100, extendable=shorter)
        # Round 5 was trained, and no checkpoint was written after it.
        assert RunFolder(folder).state == "unfinished" and len(RunFolder(folder).metrics()) == 5

    old, new = tmp_path / "runs" / "old", tmp_path / "runs" / "new"
    run(config(4), old)
    shorter = find_extendable(config(6), tmp_path / "runs")
    interrupt(new, shorter)
    assert started_after(config(6), new, extendable=shorter) == 4
    interrupt(old, [])
    assert started_after(config(6), old) == 4
    assert final_bytes(old) == final_bytes(new) == uninterrupted


def test_a_kill_or_power_cut_at_any_step(tmp_path, monkeypatch):
    """The same bytes at the end, and the rounds of the shorter run are never trained again."""
    small = {"engine": {"device": "cpu", "name": "loop"}, "model": {"name": "mlp", "hidden": [2]}}
    run(config(1, **small), tmp_path / "start" / "run")
    run(config(2, **small), tmp_path / "whole" / "run", checkpoint_seconds=0)
    expected, start = final_bytes(tmp_path / "whole" / "run"), read_tree(tmp_path / "start")
    disk = SimulatedDisk(tmp_path / "start", start)
    monkeypatch.setattr(durable, "disk", disk)
    run(config(2, **small), tmp_path / "start" / "run", checkpoint_seconds=0)
    disk.end()
    monkeypatch.setattr(durable, "disk", QuickDisk())
    known = set()
    for step, states in enumerate(disk.states):
        for cut in ("kill", "lost", "mixed-1"):
            if frozen(states[cut]) not in known:
                known.add(frozen(states[cut]))
                root = tmp_path / str(len(known))
                write_tree(root, states[cut])
                message = f"{cut} before step {step}, {disk.steps[step]}"
                assert started_after(config(2, **small), root / "run") >= 1, message
                assert final_bytes(root / "run") == expected, message
    assert len(known) > 20


def test_what_cannot_be_extended(tmp_path):
    folder = tmp_path / "run"
    run(config(2), folder)
    before = read_tree(folder)
    with pytest.raises(StoreError, match=r"\(rounds\)\. A run can be extended, but not shortened"):
        run(config(1), folder)
    with pytest.raises(StoreError, match=r"other settings \(rounds, seed\)\. Choose another"):
        run(config(3, seed=1), folder)
    shutil.rmtree(folder / "checkpoint")
    with pytest.raises(StoreError, match="cannot be extended: its checkpoints are missing"):
        run(config(3), folder)
    assert {k: v for k, v in before.items() if "checkpoint" not in k} == read_tree(folder)
    assert RunFolder(folder).state == "done"


def test_other_data_are_not_extended(tmp_path):
    """The file has changed since: in place it is refused, and a new folder starts at round 0."""
    source = {"source": "npz", "path": str(tmp_path / "own.npz"), "clients": 4}
    rng = np.random.default_rng(0)

    def write(shift: float) -> None:
        x = rng.normal(size=(40, 3)).astype("float32") + shift
        np.savez(tmp_path / "own.npz", x=x, y=rng.integers(0, 2, 40))

    def own(rounds: int) -> Config:
        return config(rounds, data=source, algorithm={"name": "fedavg"})

    write(0.0)
    run(own(2), run_folder(own(2), tmp_path))
    before = read_tree(run_folder(own(2), tmp_path))
    write(1.0)
    with pytest.raises(StoreError, match="trained on other data"):
        run(own(3), run_folder(own(2), tmp_path))
    assert read_tree(run_folder(own(2), tmp_path)) == before
    shorter = find_extendable(own(3), tmp_path / "run")
    assert len(shorter) == 1
    assert started_after(own(3), run_folder(own(3), tmp_path), extendable=shorter) == 0


def test_only_runs_that_differ_in_rounds_alone_are_found(tmp_path):
    for rounds, changes in ((2, {}), (3, {}), (2, {"seed": 1}), (9, {})):
        each = config(rounds, **changes)
        run(each, run_folder(each, tmp_path), checkpoint_seconds=0)
    damaged = tmp_path / "run" / "damaged"
    damaged.mkdir()
    (damaged / "config.toml").write_text("[")
    found = find_extendable(config(5), tmp_path / "run")
    assert [path.name for path in found] == [f"round-{n:08d}.safetensors" for n in (3, 2, 2, 1)]
    assert find_extendable(config(5), tmp_path / "nowhere") == []


def test_a_comparison_trains_each_of_its_runs_from_the_start(tmp_path):
    """Runs of a comparison are trained together, so that rounding differs: it never mixes them."""
    short = config(2)
    run(short, run_folder(short, tmp_path))
    comparison = make_comparison(
        "c", {**SETTINGS, "rounds": 3}, [("a", {}), ("b", {"rounds": 2})], [0], "accuracy"
    )
    started: dict[str, int] = {}

    def callbacks(label: str, seed: int) -> RunCallbacks:
        return RunCallbacks(on_train_start=lambda config, round: started.update({label: round}))

    a, b = compare(comparison, tmp_path, callbacks, lambda: None)
    assert started == {"a": 0}, "and row b is the finished run"
    assert a.summaries[0]["rounds"] == 3 and b.summaries[0]["rounds"] == 2
    assert a.folders[0] != b.folders[0] == run_folder(short, tmp_path)


def test_a_run_of_an_earlier_version(tmp_path):
    shutil.copytree(EARLIER, tmp_path / "run")
    settings = RunFolder(tmp_path / "run").read_config()
    longer = resolve({**settings, "rounds": settings["rounds"] + 2})
    assert started_after(longer, tmp_path / "run") == settings["rounds"]
    store = RunFolder(tmp_path / "run")
    assert [record["round"] for record in store.metrics()] == [*range(1, longer.rounds + 1)]
    assert store.summary()["rounds"] == longer.rounds
