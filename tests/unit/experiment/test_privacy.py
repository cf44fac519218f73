"""Files of a run contain no credentials, and single values of clients only if published."""

import json
import os
import stat
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import fedensemble as fe
from fedensemble.config.schema import Config, resolve
from fedensemble.core.types import Plan
from fedensemble.engines.local.client_state import ClientMemory
from fedensemble.errors import StoreError
from fedensemble.experiment.records import environment
from fedensemble.experiment.run import run
from fedensemble.redact import redact
from fedensemble.report.html import write_page
from fedensemble.testing.toy_problems import small_federation

URI = "https://ann:s3cret@host.example/path"


def config(path: Path, *, regression: bool = False, **changes: Any) -> Config:
    """A run on clients whose names and targets are easy to find again."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(60, 3)).astype(np.float32)
    y = 1234.5 + np.arange(60, dtype=np.float32) / 64 if regression else np.arange(60) % 2
    names = np.array([f"clinic-{at % 4}" for at in range(60)])
    np.savez(path / "data.npz", x=x[:40], y=y[:40], client=names[:40], x_test=x[40:], y_test=y[40:])
    return resolve(
        {
            "rounds": 2,
            "data": {"source": "npz", "path": str(path / "data.npz"), "partition": "natural"},
            "model": {"name": "mlp", "hidden": [2]},
            "ensemble": {"modes": 2, "strata": 2, "clients_per_round": 4},
            "algorithm": {"name": "fedavg", "lr": 1e-4},
            "training": {"loss": "mse" if regression else "cross_entropy"},
            "engine": {"device": "cpu", "name": "loop"},
            **changes,
        }
    )


def text_of(folder: Path) -> str:
    write_page(folder)
    return "".join(
        path.read_text()
        for path in folder.rglob("*")
        if path.suffix in (".json", ".jsonl", ".html")
    )


@pytest.mark.parametrize("publish", [True, False])
def test_single_clients_are_published_unless_that_is_turned_off(
    tmp_path: Path, publish: bool
) -> None:
    run(config(tmp_path, report={"publish_clients": publish}), tmp_path / "a")
    assert ("clinic-1" in text_of(tmp_path / "a")) == publish
    told = json.loads((tmp_path / "a" / "clients.json").read_text())
    assert (told["clients"], told["examples"]) == (4, 40) and ("counts" in told) == (
        "size" in told
    ) == publish
    page = (tmp_path / "a" / "report.html").read_text()
    assert ("Single clients are not published" in page) != publish and "4 clients" in page


@pytest.mark.parametrize("publish", [True, False])
def test_single_targets_are_published_unless_that_is_turned_off(
    tmp_path: Path, publish: bool
) -> None:
    run(config(tmp_path, regression=True, report={"publish_targets": publish}), tmp_path / "a")
    assert ("1235.2" in text_of(tmp_path / "a")) == publish
    told = json.loads((tmp_path / "a" / "predictions.json").read_text())
    assert ("points" in told) == publish and {"residuals", "spreads"} <= told.keys()
    assert (
        "Single targets are not published" in (tmp_path / "a" / "report.html").read_text()
    ) != publish


def test_what_is_published_is_no_part_of_the_run(tmp_path: Path) -> None:
    """The same hash, and the same folder is taken with either."""
    on, off = (
        config(tmp_path),
        config(tmp_path, report={"publish_clients": False, "publish_targets": False}),
    )
    assert on.hash() == off.hash()
    assert run(on, tmp_path / "a") == run(off, tmp_path / "a")


def test_the_checkpoint_of_a_saved_federation_is_private_and_its_modes_are_not(
    tmp_path: Path,
) -> None:
    before = os.umask(0o022)
    try:
        federation = small_federation(fe.Scaffold(), "loop", modes=2, strata=2)
        list(federation.rounds(1))
        folder = federation.save(tmp_path / "saved")
        for name, mode in (("checkpoint", 0o700), ("modes.safetensors", 0o644)):
            assert stat.S_IMODE((folder / name).stat().st_mode) == mode
        (checkpoint,) = (folder / "checkpoint").iterdir()
        assert stat.S_IMODE(checkpoint.stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_client_memory_on_disk_has_no_name_and_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = os.umask(0)
    try:
        memory = ClientMemory(placement="disk")
        memory.write(Plan(torch.tensor([7]), torch.tensor([0])), {"h": torch.ones(1, 2)})
    finally:
        os.umask(before)
    assert os.listdir(tmp_path) == []
    assert stat.S_IMODE(os.fstat(memory._files["h"].fileno()).st_mode) == 0o600


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (URI, "https://***@host.example/path"),
        ("http://token@host", "http://***@host"),
        ("https://a:b@c:d@host/x", "https://***@host/x"),
        ("see https://a:b@h/1, https://c:d@h/2", "see https://***@h/1, https://***@h/2"),
        ("https://host/x?access_token=abc&a=1#f", "https://host/x?access_token=***&a=1#f"),
        ("postgresql+psycopg2://u:p@db/x?sslkey=k", "postgresql+psycopg2://***@db/x?sslkey=***"),
        (
            "mail ann@host.example about https://host/a@b",
            "mail ann@host.example about https://host/a@b",
        ),
        ("--set ensemble.modes=3 a.toml", "--set ensemble.modes=3 a.toml"),
    ],
)
def test_redact(text: str, expected: str) -> None:
    assert redact(text) == expected


def test_the_command_line_is_kept_without_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["fedensemble", "run", f"--set=data.path={URI}"])
    assert environment(config(tmp_path))["command"] == [
        "run",
        "--set=data.path=https://***@host.example/path",
    ]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A stand-in for the package mlflow, and what it was told."""
    told: dict[str, Any] = {"uris": [], "rounds": [], "fail": None}

    class MlflowException(Exception):  # noqa: N818 (theirs)
        pass

    class Client:
        def __init__(self, tracking_uri: str) -> None:
            told["uris"].append(tracking_uri)

        def __getattr__(self, name: str) -> Any:
            def call(*arguments: Any, **options: Any) -> Any:
                if told["fail"] == name:
                    raise MlflowException(f"API request to {URI}/api/2.0 failed with exception")
                if name == "log_batch" and "metrics" in options:
                    told["rounds"].append(options["metrics"][0][3])
                if name == "get_metric_history":
                    return []
                found = ModuleType("found")
                found.experiment_id, found.info = "1", ModuleType("info")  # type: ignore[attr-defined]
                found.info.run_id = "run-1"  # type: ignore[attr-defined]
                return found

            return call

    package, entities, exceptions = (
        ModuleType(name) for name in ("mlflow", "mlflow.entities", "mlflow.exceptions")
    )
    package.MlflowClient, exceptions.MlflowException = Client, MlflowException  # type: ignore[attr-defined]
    entities.Param = entities.Metric = lambda *arguments: arguments  # type: ignore[attr-defined]
    for module in (package, entities, exceptions):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", URI)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return told


def test_mlflow_is_given_the_credentials_and_no_file_is(
    tmp_path: Path, server: dict[str, Any]
) -> None:
    run(config(tmp_path, track=["mlflow"]), tmp_path / "a")
    assert server["uris"] == [URI] and server["rounds"] == [1, 2]
    kept = json.loads((tmp_path / "a" / "mlflow.json").read_text())
    assert kept == {"uri": "https://***@host.example/path", "run_id": "run-1"}
    assert not [
        path
        for path in (tmp_path / "a").rglob("*")
        if path.is_file() and b"s3cret" in path.read_bytes()
    ]


def test_credentials_that_an_older_version_wrote_are_taken_out(
    tmp_path: Path, server: dict[str, Any]
) -> None:
    run(config(tmp_path, track=["mlflow"]), tmp_path / "a")
    (tmp_path / "a" / "summary.json").unlink()
    (tmp_path / "a" / "mlflow.json").write_text(json.dumps({"uri": URI, "run_id": "run-0"}))
    run(config(tmp_path, track=["mlflow"]), tmp_path / "a")
    kept = json.loads((tmp_path / "a" / "mlflow.json").read_text())
    # the same run goes on
    assert kept == {"uri": "https://***@host.example/path", "run_id": "run-0"}


@pytest.mark.parametrize("step", ["create_run", "log_batch", "set_terminated"])
def test_errors_of_mlflow_are_told_without_credentials(
    tmp_path: Path, server: dict[str, Any], step: str
) -> None:
    server["fail"] = step
    with pytest.raises(StoreError, match=r"MLflow at https://\*\*\*@host\.example") as caught:
        run(config(tmp_path, track=["mlflow"]), tmp_path / "a")
    assert "s3cret" not in str(caught.value) and "API request" in str(caught.value)
