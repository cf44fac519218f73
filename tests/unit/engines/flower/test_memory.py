"""What a client keeps on its disk is private, and does not stay for ever."""

import os
import stat
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from flwr.app import RecordDict

from fedensemble.engines.flower.client_state import ClientStateStore
from fedensemble.engines.flower.messages import Visit
from fedensemble.errors import InputError

DAY = 24 * 3600


def visit(training: str, round: int = 1, mode: int = 0) -> Visit:
    known = {"training": training, "round": round, "mode": mode, "counted": round - 1, "client": 0}
    return Visit(**known, **{name: 0 for name in Visit._fields if name not in known})


def keep(folder: Path, training: str, round: int = 1, days: float = 30.0) -> None:
    store = ClientStateStore(RecordDict(), folder, days)
    store.delete_expired(training)
    store.save(visit(training, round), {"h": torch.ones(3)})


def age(folder: Path, days: float) -> None:
    then = time.time() - days * DAY
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (then, then))


def test_files_are_for_their_user_alone_also_where_older_folders_were_open(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        keep(tmp_path / "new", "a")
        (tmp_path / "old" / "memory").mkdir(parents=True)
        keep(tmp_path / "old", "a")
    finally:
        os.umask(before)
    for name in ("new", "old"):
        top = tmp_path / name / "memory"
        assert [
            stat.S_IMODE(path.stat().st_mode) for path in (top, top / "a", top / "a" / "0")
        ] == [0o700] * 3
        assert stat.S_IMODE((top / "a" / "0" / "1.safetensors").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def test_memory_of_trainings_long_over_is_deleted(tmp_path: Path) -> None:
    keep(tmp_path, "former")
    keep(tmp_path, "paused")
    age(tmp_path / "memory" / "former", 31)
    age(tmp_path / "memory" / "paused", 29)
    keep(tmp_path, "now")
    assert sorted(os.listdir(tmp_path / "memory")) == ["now", "paused"]
    age(tmp_path / "memory" / "now", 99)  # one's own stays however long it paused
    store = ClientStateStore(RecordDict(), tmp_path)
    store.delete_expired("now")
    assert torch.equal(store.load(visit("now", 2))["h"], torch.ones(3))
    keep(tmp_path, "now", 2, days=0)
    assert os.listdir(tmp_path / "memory") == ["now"]


def test_what_is_not_ours_is_never_deleted(tmp_path: Path) -> None:
    (tmp_path / "memory" / "photos").mkdir(parents=True)
    (tmp_path / "memory" / "photos" / "cat.png").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "memory" / "link").symlink_to(tmp_path / "elsewhere")
    age(tmp_path / "memory", 999)
    keep(tmp_path, "now")
    assert (tmp_path / "memory" / "photos" / "cat.png").exists() and (
        tmp_path / "elsewhere"
    ).is_dir()


def test_half_written_files_of_a_dead_process_are_deleted(tmp_path: Path) -> None:
    keep(tmp_path, "a")
    (tmp_path / "memory" / "a" / "0" / ".9.safetensors.4711.part").touch()
    keep(tmp_path, "a", 2)
    assert sorted(os.listdir(tmp_path / "memory" / "a" / "0")) == ["1.safetensors", "2.safetensors"]


def test_settings_of_the_node(tmp_path: Path) -> None:
    class Context:
        state = RecordDict()
        node_config: ClassVar[dict[str, Any]] = {"memory-dir": str(tmp_path), "memory-days": 7}

    store = ClientStateStore.from_context(Context())
    assert (store.folder, store.days) == (tmp_path, 7.0)
    Context.node_config = {}
    assert (
        ClientStateStore.from_context(Context()).folder,
        ClientStateStore.from_context(Context()).days,
    ) == (None, 30.0)
    for wrong in ("week", -1, float("nan")):
        Context.node_config = {"memory-days": wrong}
        with pytest.raises(InputError, match="memory-days must be a number"):
            ClientStateStore.from_context(Context())
