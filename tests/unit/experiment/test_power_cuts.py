"""A run that is killed or loses power at any step ends with the same bytes after a restart."""

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedensemble import durable
from fedensemble.config.schema import Config, resolve
from fedensemble.config.search_space import Range
from fedensemble.experiment.run import RunCallbacks, run
from fedensemble.experiment.studies.tune import make_search, tune

from .simulated_disk import CUTS, QuickDisk, SimulatedDisk, Tree, frozen, read_tree, write_tree

SETTINGS: dict[str, Any] = {
    "rounds": 3,
    "data": {"source": "gaussians", "n": 40, "n_test": 10, "classes": 2, "clients": 4},
    "model": {"name": "mlp", "hidden": [2]},
    "algorithm": {"name": "scaffold"},  # with client state
    "ensemble": {"modes": 2, "strata": 2, "clients_per_round": 2},
    "evaluation": {"every": 2},
    "engine": {"device": "cpu", "name": "loop"},
}
RUN = "below/run"


@pytest.fixture(autouse=True, scope="module")
def quick_disk() -> Iterator[None]:
    before, durable.disk = durable.disk, QuickDisk()
    yield
    durable.disk = before


@pytest.fixture(scope="module")
def config() -> Config:
    return resolve(SETTINGS)


def train(
    config: Config, root: Path, tree: Tree | None = None, disk: SimulatedDisk | None = None
) -> SimulatedDisk:
    """Trains a run on a disk with the files `tree`."""
    disk = disk or SimulatedDisk(root, tree)
    before, durable.disk = durable.disk, disk
    try:
        run(config, root / RUN, checkpoint_seconds=0)
    finally:
        durable.disk = before
    disk.end()
    return disk


def final_bytes(root: Path) -> Tree:
    """All files of a run, without the time it took and what depends on that."""
    tree = read_tree(root)
    summary = json.loads(tree[f"{RUN}/summary.json"] or b"")
    del summary["seconds"]
    checksums = json.loads(tree[f"{RUN}/checksums.json"] or b"")
    del checksums["summary.json"]
    return {
        **tree,
        f"{RUN}/summary.json": repr(summary).encode(),
        f"{RUN}/checksums.json": repr(checksums).encode(),
    }


@pytest.fixture(scope="module")
def undisturbed(
    config: Config, tmp_path_factory: pytest.TempPathFactory
) -> tuple[SimulatedDisk, Tree]:
    root = tmp_path_factory.mktemp("undisturbed")
    return train(config, root), final_bytes(root)


def test_every_kind_of_step_is_there(undisturbed: tuple[SimulatedDisk, Tree]) -> None:
    """And the disk has compared the files with its model before each of them: no write passed it
    by.
    """
    disk, tree = undisturbed
    words = {step.split()[0] for step in disk.steps}
    assert words == {"mkdir", "create", "append", "write", "fsync", "rename", "remove", "end"}
    assert len(disk.steps) > 60
    assert not [name for name in tree if name.endswith(".part")]
    assert {Path(name).name for name in tree} >= {
        "summary.json",
        "modes.safetensors",
        "predictions.json",
    }


def durable_rounds(disk: SimulatedDisk) -> list[int]:
    """For each step, up to which round a checkpoint was complete before it."""
    found, done = [], 0
    for before, step in zip(["", *disk.steps], disk.steps, strict=False):
        found.append(done)
        if before.startswith("rename to round-") and step == "fsync folder checkpoint":
            done = int(before.removeprefix("rename to round-").removesuffix(".safetensors"))
    return found


def resumed_round(config: Config, folder: Path) -> int:
    """Carries a run to its end; returns the round after which it began."""
    rounds = [config.rounds]  # of a finished run
    run(
        config,
        folder,
        RunCallbacks(on_train_start=lambda config, round: rounds.append(round)),
        checkpoint_seconds=0,
    )
    return rounds[-1]


def test_a_kill_or_power_cut_at_any_step(
    config: Config, undisturbed: tuple[SimulatedDisk, Tree], tmp_path: Path
) -> None:
    """The same bytes at the end, and no round is trained again whose checkpoint was complete."""
    disk, expected = undisturbed
    known: dict[Any, int] = {}
    for step, (states, done) in enumerate(zip(disk.states, durable_rounds(disk), strict=True)):
        for cut in CUTS:
            key = frozen(states[cut])
            if key not in known:
                root = tmp_path / str(len(known))
                write_tree(root, states[cut])
                known[key] = resumed_round(config, root / RUN)
                assert final_bytes(root) == expected, (
                    f"{cut} before step {step}, {disk.steps[step]}"
                )
            assert known[key] >= done, f"{cut} before step {step}, {disk.steps[step]}"
    assert len(known) > len(disk.steps) / 2


def test_the_simulation_notices_a_folder_that_is_not_synced(config: Config, tmp_path: Path) -> None:
    class Forgetful(SimulatedDisk):
        def sync_folder(self, path: Path) -> None:
            self._note(f"fsync folder {path.name}")

    disk = train(config, tmp_path, disk=Forgetful(tmp_path))
    lost = [
        state["lost"] for state, done in zip(disk.states, durable_rounds(disk), strict=True) if done
    ]
    assert lost and not any("checkpoint/round-" in name for state in lost for name in state)


def test_several_cuts_in_a_row(
    config: Config, undisturbed: tuple[SimulatedDisk, Tree], tmp_path: Path
) -> None:
    _, expected = undisturbed
    draw = random.Random(0)
    for chain in range(12):
        tree: Tree = {}
        for death in range(draw.randint(2, 5)):
            root = tmp_path / f"{chain}-{death}"
            write_tree(root, tree)
            disk = train(config, root, tree)
            tree = disk.states[draw.randrange(len(disk.states))][draw.choice(CUTS)]
        write_tree(tmp_path / str(chain), tree)
        run(config, tmp_path / str(chain) / RUN, checkpoint_seconds=0)
        assert final_bytes(tmp_path / str(chain)) == expected


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_that_is_gone_leaves_what_the_model_says(
    config: Config, undisturbed: tuple[SimulatedDisk, Tree], tmp_path: Path
) -> None:
    """Real deaths at some steps: the states of the simulation are those that a process leaves."""
    disk, expected = undisturbed

    class Mortal(SimulatedDisk):
        def _note(self, step: str) -> None:
            super()._note(step)
            if len(self.steps) == last + 1:
                os._exit(0)

    for last in range(0, len(disk.steps) - 1, 7):
        root = tmp_path / str(last)
        root.mkdir()
        child = os.fork()
        if child == 0:
            durable.disk = Mortal(root)
            try:
                run(config, root / RUN, checkpoint_seconds=0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert (
            without_numbers(read_tree(root)).keys()
            == without_numbers(disk.states[last]["kill"]).keys()
        )
        run(config, root / RUN, checkpoint_seconds=0)
        assert final_bytes(root) == expected


def without_numbers(tree: Tree) -> Tree:
    """Temporary files without the numbers of their process."""
    return {
        name.rsplit(".", 2)[0] if name.endswith(".part") else name: held
        for name, held in tree.items()
    }


def test_metrics_that_are_lost_or_damaged_are_restored(config: Config, tmp_path: Path) -> None:
    """A checkpoint whose tensors are good is never given up because of metrics."""
    run(config, tmp_path / "a" / RUN, checkpoint_seconds=0)
    expected = final_bytes(tmp_path / "a")
    metrics = expected[f"{RUN}/metrics.jsonl"]
    for number, content in enumerate(
        (None, b"", metrics[:50], metrics.replace(b"1", b"2"), b"\xff" + metrics)
    ):
        root = tmp_path / str(number)
        write_tree(root, read_tree(tmp_path / "a"))
        (root / RUN / "summary.json").unlink()
        (root / RUN / "metrics.jsonl").unlink()
        if content is not None:
            (root / RUN / "metrics.jsonl").write_bytes(content)
        said: list[str] = []
        run(config, root / RUN, RunCallbacks(on_message=said.append), checkpoint_seconds=0)
        assert final_bytes(root) == expected
        assert "did not match round-00000003.safetensors; its records were restored" in said[0]
        assert "after round 3" in said[1]


def search(root: Path, tree: Tree | None = None, disk: SimulatedDisk | None = None) -> Any:
    """Carries a search of two batches with two trials each to its end; returns its trials."""
    spaces = [Range("algorithm.lr", 0.1, 0.5)]
    settings = {**SETTINGS, "rounds": 1, "algorithm": {"name": "fedavg"}}
    before, durable.disk = durable.disk, disk or durable.disk
    try:
        made = make_search(settings, spaces, "nll")
        return tune(made, root, 4, 2, lambda *_: RunCallbacks(), lambda: None)
    finally:
        durable.disk = before


def test_a_search_continues_after_a_power_cut_at_any_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its runs are synced in groups, so that a cut leaves some of their files incomplete."""
    monkeypatch.setattr(durable, "_SYNCS_AT_ONCE", 1)  # the simulation is not for threads
    disk = SimulatedDisk(tmp_path / "undisturbed")
    (tmp_path / "undisturbed").mkdir()
    trials = search(tmp_path / "undisturbed", disk=disk)
    disk.end()
    assert all(trial.values for trial in trials)
    known: set[Any] = set()
    for step, states in list(enumerate(disk.states))[::5]:
        cut = CUTS[1:][step // 5 % len(CUTS[1:])]
        if (key := frozen(states[cut])) not in known:
            root = tmp_path / str(len(known))
            write_tree(root, states[cut])
            known.add(key)
            for again, trial in zip(search(root), trials, strict=True):
                assert again.settings == trial.settings
                assert again.values == pytest.approx(trial.values), f"{cut} before step {step}"
    assert len(known) > 20
