"""What a client keeps for each mode: in Flower's own state of the node and, where it has a folder,
on its disk.

Client state is like a gradient: it tells of the client's data. On disk only the user who runs the
node may read it.
"""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from pathlib import Path

from flwr.app import Context, RecordDict

from ...checkpoint import read_checkpoint, write_checkpoint
from ...durable import clean_leftovers, make_folders, make_private, reason
from ...errors import InputError, StoreError
from ...flat_params import Tree
from .messages import Visit, pack, unpack

TOP = "memory"
DAYS = 30.0


class KeptMemory:
    """Memory by mode and round: the one that counted last, and the one after it, which may yet come
    to count.

    Args:
        records: the node's `context.state`; it lasts as long as the node's process and the run.
        folder: where memory outlives both, or None.
        days: memory of another training that was not written for so long is deleted. A training
            that was only paused may continue until then; if it does later, its clients start with
            new memory and say so.
    """

    def __init__(self, records: RecordDict, folder: Path | None = None, days: float = DAYS) -> None:
        self.records, self.folder, self.days = records, folder, days

    @classmethod
    def of(cls, context: Context) -> KeptMemory:
        """That of a node, with `memory-dir` and `memory-days` of its configuration."""
        folder, days = (
            context.node_config.get("memory-dir"),
            context.node_config.get("memory-days", DAYS),
        )
        if isinstance(days, bool) or not isinstance(days, (int, float)) or not days >= 0:
            raise InputError(f"memory-days must be a number of days, 0 or more; got {days!r}.")
        return cls(context.state, Path(str(folder)).expanduser() if folder else None, float(days))

    def find(self, visit: Visit) -> Tree | None:
        """Memory after the round that counted last, or None if there is none any more."""
        name = _name(visit, visit.counted)
        if name in self.records:
            return unpack(self.records, name)
        if self.folder is None:
            return None
        try:
            return read_checkpoint(self._file(name))[0]
        except StoreError:
            return None

    def keep(self, visit: Visit, memory: Tree) -> None:
        """Keeps what a visit leaves behind, and drops what can never count again."""
        fresh, counted = _name(visit, visit.round), _name(visit, visit.counted)
        others = f"{TOP}/{visit.training}/{visit.mode}/"
        for name in [name for name in self.records if name.startswith(f"{TOP}/")]:
            if name != counted and (
                name.startswith(others) or not name.startswith(f"{TOP}/{visit.training}/")
            ):
                del self.records[name]
        self.records[fresh] = pack(memory)
        if self.folder is not None:
            self._prepare()
            write_checkpoint(self._file(fresh), memory, {}, private=True)
            for path in self._file(fresh).parent.glob("*.safetensors"):
                if path not in (self._file(fresh), self._file(counted)):
                    path.unlink(missing_ok=True)
            clean_leftovers(self._file(fresh).parent)

    def forget_others(self, training: str) -> None:
        """Deletes what is on disk of other trainings that seem to be over: not written for
        `days`.
        """
        if self.folder is None or not (self.folder / TOP).is_dir():
            return
        oldest = time.time() - self.days * 24 * 3600
        with suppress(OSError):  # it can wait: a visit must not fail for it
            for folder in (self.folder / TOP).iterdir():
                if folder.name == training or folder.is_symlink() or not folder.is_dir():
                    continue
                held = list(folder.rglob("*"))
                ours = all(
                    path.is_dir() or path.suffix in (".safetensors", ".part") for path in held
                )
                if ours and max(path.stat().st_mtime for path in (folder, *held)) < oldest:
                    shutil.rmtree(folder, ignore_errors=True)

    def _prepare(self) -> None:
        """Folders that only this user may enter, also where they are left from before this was
        so.
        """
        assert self.folder is not None
        top = self.folder / TOP
        try:
            make_folders(top, private=True)
            make_private(top)
        except OSError as error:
            raise StoreError(f"memory-dir {self.folder} cannot be used: {reason(error)}") from None

    def _file(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{name}.safetensors"


def _name(visit: Visit, round: int) -> str:
    return f"{TOP}/{visit.training}/{visit.mode}/{round}"
