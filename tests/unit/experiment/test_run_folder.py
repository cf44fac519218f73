"""The folder of a run: its lock, its checkpoints, and messages about files that have changed."""

import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from fedensemble import durable
from fedensemble.checkpoint_file import read_checkpoint, write_checkpoint
from fedensemble.config.schema import Config, resolve
from fedensemble.errors import StoreError
from fedensemble.experiment.run import RunCallbacks, run
from fedensemble.experiment.storage import metrics_log
from fedensemble.experiment.storage.ensemble_file import load_ensemble
from fedensemble.experiment.storage.metrics_log import BLOCK, MetricsLog, unpack
from fedensemble.experiment.storage.run_folder import RunFolder

SETTINGS: dict[str, Any] = {
    "rounds": 4,
    "data": {"source": "gaussians", "n": 40, "n_test": 10, "classes": 2, "clients": 4},
    "model": {"name": "mlp", "hidden": [2]},
    "algorithm": {"name": "scaffold"},
    "ensemble": {"modes": 2, "strata": 2, "clients_per_round": 2},
    "engine": {"device": "cpu", "name": "loop"},
}


@pytest.fixture
def config() -> Config:
    return resolve(SETTINGS)


def at_round(number: int, do: Any) -> RunCallbacks:
    return RunCallbacks(
        on_round_end=lambda report, metrics: do() if report.round == number else None
    )


def test_a_folder_with_nothing_but_leftovers_is_taken(config: Config, tmp_path: Path) -> None:
    """A process that is killed while it writes config.toml leaves only these files."""
    (tmp_path / ".config.toml.4711-0a1b2c3d.part").write_bytes(b"rounds")
    (tmp_path / ".config.toml.4711.part").write_bytes(b"rounds")
    (tmp_path / ".lock").touch()
    run(config, tmp_path)
    assert RunFolder(tmp_path).done and not list(tmp_path.rglob("*.part"))


def test_leftovers_of_checkpoints_are_deleted(config: Config, tmp_path: Path) -> None:
    run(config, tmp_path, checkpoint_seconds=0)
    (tmp_path / "checkpoint" / ".round-00000009.safetensors.4711.part").write_bytes(b"half")
    run(config, tmp_path)
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize("again", [True, False])
def test_a_folder_that_is_swapped_ends_the_run(config: Config, tmp_path: Path, again: bool) -> None:
    """Otherwise two runs would write into one folder without an error, and mix their records."""
    folder, expected = tmp_path / "a", tmp_path / "expected"
    run(config, expected)

    def swap() -> None:
        shutil.rmtree(folder)
        if again:
            run(config, folder)

    with pytest.raises(
        StoreError, match="was replaced by another one" if again else "was deleted or moved"
    ):
        run(config, folder, at_round(2, swap), checkpoint_seconds=0)
    if again:
        assert (folder / "metrics.jsonl").read_bytes() == (expected / "metrics.jsonl").read_bytes()
    else:
        assert not folder.exists()


def test_a_folder_that_is_swapped_after_the_last_round(config: Config, tmp_path: Path) -> None:
    folder = tmp_path / "a"

    def swap() -> None:
        folder.rename(tmp_path / "moved")
        folder.mkdir()
        (folder / ".lock").touch()

    with pytest.raises(StoreError, match="was replaced by another one"):
        run(config, folder, at_round(4, swap))
    assert os.listdir(folder) == [".lock"]


def test_saving_reads_nothing(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints must not read and hash all metrics so far, or long runs become slow."""
    store = RunFolder(tmp_path)
    store.claim(config)
    assert store.resume({}, print) is None
    monkeypatch.setattr(MetricsLog, "read", lambda self: pytest.fail("read"))
    for round in range(1, 4):
        store.append_metrics({"round": round})
        store.save({"a": torch.ones(2)}, round, {})
    monkeypatch.undo()
    store.release()
    assert RunFolder(tmp_path).resume({}, pytest.fail)[1] == 3


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_packed_metrics_are_a_function_of_the_content(tmp_path: Path, size: int) -> None:
    lines = [{"round": at, "text": "x" * (at % 97)} for at in range(1, size // 60)] or []
    grown, whole = MetricsLog(tmp_path / "a"), MetricsLog(tmp_path / "a")
    for line in lines:
        grown.append(line)
    content = grown.read()
    assert torch.equal(grown.packed(), whole.packed()) and grown.facts() == whole.facts()
    assert unpack(grown.packed(), len(content)) == content
    for wrong in (len(content) - 1, len(content) + 1, -1):
        assert unpack(grown.packed(), wrong) is None
    assert unpack(torch.ones(9, dtype=torch.uint8), 9) is None and unpack(torch.ones(9), 9) is None
    if len(content):
        assert unpack(grown.packed()[:-1], len(content)) is None


def as_older_version(folder: Path) -> None:
    """Rewrites checkpoints as earlier versions wrote them, with only the hash of the metrics."""
    for path in (folder / "checkpoint").iterdir():
        tensors, facts = read_checkpoint(path)
        del tensors["metrics"]
        write_checkpoint(path, tensors, facts)
    (folder / "summary.json").unlink()
    (folder / "checksums.json").unlink()


@pytest.mark.parametrize("rounds", [4, 3, 1, 0])
def test_older_checkpoints_are_kept_whatever_became_of_metrics(
    config: Config, tmp_path: Path, rounds: int
) -> None:
    accuracy = run(config, tmp_path, checkpoint_seconds=0)["test"]["accuracy"]
    modes, lines = (
        (tmp_path / "modes.safetensors").read_bytes(),
        (tmp_path / "metrics.jsonl").read_bytes().split(b"\n"),
    )
    as_older_version(tmp_path)
    (tmp_path / "metrics.jsonl").write_bytes(
        b"\n".join(lines[:rounds]) + b"\n" * bool(rounds) + b'{"round": '
    )
    messages, began = list[str](), list[int]()
    run(
        config,
        tmp_path,
        RunCallbacks(
            on_message=messages.append, on_train_start=lambda config, round: began.append(round)
        ),
    )
    assert began == [4] and (tmp_path / "modes.safetensors").read_bytes() == modes
    assert len(RunFolder(tmp_path).metrics()) == rounds
    summary = RunFolder(tmp_path).summary()
    assert (
        summary.get("rounds_without_metrics", 0) == 4 - rounds
        and summary["test"]["accuracy"] == accuracy
    )
    lost = f"its last {4 - rounds} rounds are lost"
    assert any(lost in message for message in messages) == (rounds < 4)


def test_runs_without_checksums_are_loaded_without_a_message(
    config: Config, tmp_path: Path
) -> None:
    run(config, tmp_path)
    (tmp_path / "checksums.json").unlink()
    values = (tmp_path / "config.toml").read_text()
    (tmp_path / "config.toml").write_text(values + "\n")
    assert RunFolder(tmp_path).changes() == ""
    assert len(load_ensemble(tmp_path)) == 2
    messages: list[str] = []
    run(config, tmp_path, RunCallbacks(on_message=messages.append))
    assert not messages


@pytest.mark.parametrize(
    "name",
    [
        "config.toml",
        "env.json",
        "metrics.jsonl",
        "clients.json",
        "predictions.json",
        "summary.json",
        "checksums.json",
    ],
)
def test_a_changed_file_is_named(config: Config, tmp_path: Path, name: str) -> None:
    run(config, tmp_path)
    store = RunFolder(tmp_path)
    assert store.changes() == ""
    before = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(before + b" " if name != "checksums.json" else before[:20])
    assert str(tmp_path / name) in store.changes() and "accept the change" in store.changes()
    messages: list[str] = []
    run(config, tmp_path, RunCallbacks(on_message=messages.append))
    assert messages == [store.changes()]
    if name == "config.toml":
        with pytest.raises(StoreError, match=r"config\.toml does not match its checksum"):
            load_ensemble(tmp_path)
    else:
        load_ensemble(tmp_path)
    (tmp_path / name).write_bytes(before)
    assert store.changes() == ""


def test_checkpoints_are_private(config: Config, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        (tmp_path / "a" / "checkpoint").mkdir(parents=True)
        run(config, tmp_path / "b", checkpoint_seconds=0)
        shutil.copytree(
            tmp_path / "b" / "checkpoint", tmp_path / "a" / "checkpoint", dirs_exist_ok=True
        )
        (tmp_path / "a" / "checkpoint").chmod(0o755)
        shutil.copy(tmp_path / "b" / "config.toml", tmp_path / "a")
        (tmp_path / "a" / "checkpoint" / "round-00000004.safetensors").unlink()
        run(config, tmp_path / "a", checkpoint_seconds=0)
    finally:
        os.umask(before)
    for folder in (tmp_path / "a" / "checkpoint", tmp_path / "b" / "checkpoint"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / "round-00000004.safetensors").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "b" / "summary.json").stat().st_mode) == 0o666


def deny(*_: Any, **__: Any) -> Any:
    raise PermissionError(13, "Permission denied")


def test_metrics_that_cannot_be_read(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(config, tmp_path)
    (tmp_path / "summary.json").unlink()
    real = Path.read_bytes
    monkeypatch.setattr(
        Path, "read_bytes", lambda path: deny() if path.name == "metrics.jsonl" else real(path)
    )
    with pytest.raises(StoreError, match=r"metrics\.jsonl: no permission"):
        RunFolder(tmp_path).metrics()
    with pytest.raises(StoreError, match=r"metrics\.jsonl: no permission"):
        run(config, tmp_path)


def test_a_checkpoint_folder_that_cannot_be_read(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(config, tmp_path)
    (tmp_path / "summary.json").unlink()
    real, calls = os.scandir, os.listdir
    wrong = str(tmp_path / "checkpoint")
    monkeypatch.setattr(
        os, "scandir", lambda path=".": deny() if str(path) == wrong else real(path)
    )
    monkeypatch.setattr(
        os, "listdir", lambda path=".": deny() if str(path) == wrong else calls(path)
    )
    with pytest.raises(StoreError, match=r"no permission"):
        run(config, tmp_path)


def test_read_only_folders_are_named(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ReadOnly(durable.Disk):
        def create(self, path, mode=0o666):
            raise OSError(30, "Read-only file system")

        def remove(self, path):
            raise OSError(30, "Read-only file system")

    monkeypatch.setattr(durable, "disk", ReadOnly())
    with pytest.raises(StoreError, match="read-only"):
        run(config, tmp_path)


@pytest.mark.parametrize("line", [b"[]", b"3", b"{}", b'{"round": "one"}', b"[" * 100_000, b"\xff"])
def test_a_line_that_is_not_a_record(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"round": 1}\n' + line + b"\n")
    with pytest.raises(StoreError, match="line 2 is not the record of a round"):
        RunFolder(tmp_path).metrics()


def test_records_may_wait_in_memory(tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr(metrics_log.time, "monotonic", lambda: now)
    log, at_once = MetricsLog(tmp_path / "waits"), MetricsLog(tmp_path / "at-once")
    log.delay = 1.0
    sizes = []
    for number in range(1, 6):
        log.append({"round": number})
        at_once.append({"round": number})
        sizes.append(log.path.read_bytes().count(b"\n"))
        now += 0.4
    assert sizes == [1, 1, 1, 4, 4]
    assert log.facts() == at_once.facts()
    assert log.records() == at_once.records() and len(log.records()) == 5
    assert log.path.read_bytes() == at_once.path.read_bytes()
    log.append({"round": 6})
    assert log.path.read_bytes().count(b"\n") == 5
    log.sync()
    assert log.path.read_bytes().count(b"\n") == 6
