"""Trackers log each record of metrics.jsonl exactly once, also if the run is interrupted."""

import json
import socket
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fedensemble.config.schema import Config, resolve
from fedensemble.errors import InputError
from fedensemble.experiment.run import RunCallbacks, run
from fedensemble.tracking.tracker import Tracker, scalars, trackers

SETTINGS: dict[str, Any] = {
    "name": "tracked",
    "rounds": 6,
    "data": {"source": "gaussians", "n": 120, "n_test": 40, "classes": 3, "clients": 6},
    "model": {"name": "mlp", "hidden": [4]},
    "ensemble": {"modes": 2, "strata": 2, "clients_per_round": 4},
    "evaluation": {"every": 3},
    "engine": {"device": "cpu", "name": "loop"},
}


def config(*names: str) -> Config:
    return resolve({**SETTINGS, "track": list(names)})


def stop_after(rounds: int) -> RunCallbacks:
    """Callbacks that kill the run after a round, before its checkpoint."""

    def advanced(report: Any, metrics: Any) -> None:
        if report.round == rounds:
            raise RuntimeError("pulled")

    return RunCallbacks(on_round_end=advanced)


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Registers a tracker for the test, and returns its calls."""
    calls: dict[str, list[Any]] = {"opened": [], "rounds": [], "closed": []}

    class Notebook(Tracker):
        package, trace = "json", "notebook"

        def __init__(self, folder: Path, settings: Any, records: Any) -> None:
            calls["opened"].append([record["round"] for record in records])
            (folder / self.trace).touch()

        def record(self, record: Any) -> None:
            calls["rounds"].append(record["round"])

        def close(self, finished: bool) -> None:
            calls["closed"].append(finished)

    monkeypatch.setitem(trackers._items, "notebook", Notebook)
    return calls


def test_every_round_and_the_end_are_logged(tmp_path: Path, notebook: dict[str, list[Any]]) -> None:
    run(config("notebook"), tmp_path / "a")
    assert notebook == {"opened": [[]], "rounds": [1, 2, 3, 4, 5, 6], "closed": [True]}
    run(config("notebook"), tmp_path / "a")
    assert notebook["opened"] == [[]]  # the finished run is in the log already


def test_a_resumed_run_passes_the_earlier_records(
    tmp_path: Path, notebook: dict[str, list[Any]]
) -> None:
    with pytest.raises(RuntimeError, match="pulled"):
        run(config("notebook"), tmp_path / "a", stop_after(4), checkpoint_seconds=0)
    run(config("notebook"), tmp_path / "a")
    assert notebook["opened"] == [[], [1, 2, 3]]
    assert notebook["rounds"] == [1, 2, 3, 4, 4, 5, 6]
    assert notebook["closed"] == [False, True]


def test_a_finished_run_is_logged_afterwards(
    tmp_path: Path, notebook: dict[str, list[Any]]
) -> None:
    run(config(), tmp_path / "a")
    run(config("notebook"), tmp_path / "a")
    assert notebook["opened"] == [[1, 2, 3, 4, 5, 6]] and notebook["closed"] == [True]


def test_tracking_does_not_change_the_run(tmp_path: Path, notebook: dict[str, list[Any]]) -> None:
    assert config().hash() == config("notebook").hash()
    for name in ("a", "b"):
        run(config(*(["notebook"] if name == "b" else [])), tmp_path / name)
    for file in ("metrics.jsonl", "modes.safetensors", "predictions.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_unknown_tracker_is_named() -> None:
    with pytest.raises(InputError, match=r"tensorbord.*tensorboard"):
        config("tensorbord")


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_missing_package_says_what_to_install(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=rf'pip install "fedensemble\[{name}\]"'):
        run(config(name), tmp_path / "a")
    assert not (tmp_path / "a" / "metrics.jsonl").exists()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Records network access of the process, which fails."""
    accesses: list[Any] = []

    def reject(*arguments: Any, **options: Any) -> None:
        accesses.append(arguments)
        raise OSError("no network here")

    monkeypatch.setattr(socket, "getaddrinfo", reject)
    monkeypatch.setattr(socket.socket, "connect", reject)
    return accesses


@pytest.mark.filterwarnings("ignore")  # theirs
def test_tensorboard_has_every_value_once(tmp_path: Path, calls: list[Any]) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with pytest.raises(RuntimeError, match="pulled"):
        run(config("tensorboard"), tmp_path / "a", stop_after(4), checkpoint_seconds=0)
    run(config("tensorboard"), tmp_path / "a")
    events = EventAccumulator(
        str(tmp_path / "a" / "tensorboard"), size_guidance={"scalars": 0}
    ).Reload()
    logged = [
        (event.step, name, event.value)
        for name in events.Tags()["scalars"]
        for event in events.Scalars(name)
    ]
    check_once(logged, records(tmp_path / "a"))
    assert not calls


@pytest.mark.filterwarnings("ignore")  # theirs
def test_mlflow_has_every_value_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[Any]
) -> None:
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(RuntimeError, match="pulled"):
        run(config("mlflow"), tmp_path / "a", stop_after(4), checkpoint_seconds=0)
    run(config("mlflow"), tmp_path / "a")
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (made,) = client.search_runs([client.get_experiment_by_name("tracked").experiment_id])
    assert made.info.status == "FINISHED" and made.data.params["ensemble.modes"] == "2"
    names = made.data.metrics
    logged = [
        (m.step, name, m.value)
        for name in names
        for m in client.get_metric_history(made.info.run_id, name)
    ]
    check_once(logged, records(tmp_path / "a"))
    assert not calls


def check_once(logged: list[tuple[int, str, float]], records: list[dict[str, Any]]) -> None:
    expected = {(r["round"], name): value for r in records for name, value in scalars(r).items()}
    assert Counter((step, name) for step, name, _ in logged) == Counter(expected.keys())
    for step, name, value in logged:
        assert value == pytest.approx(expected[step, name], rel=1e-6)
