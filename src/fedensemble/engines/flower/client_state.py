"""Client state per mode: in Flower's state of the node and, where `memory-dir` is set, on disk.

Client state reveals as much about the client's data as a gradient does. On disk, only the user who
runs the node can read it.
"""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from pathlib import Path

from flwr.app import Context, RecordDict

from ...checkpoint_file import read_checkpoint, write_checkpoint
from ...durable import clean_leftovers, describe_os_error, make_folders, make_private
from ...errors import InputError, StoreError
from ...flat_params import Tree
from .messages import Visit, pack, unpack

PREFIX = "memory"  # first part of record names, and name of the folder in `memory-dir`
RETENTION_DAYS = 30.0


class ClientStateStore:
    """Client state by mode and round.

    Two versions are kept per mode: the state after the last round that counted, and the state after
    the visit that follows it. The client does not know yet whether the second one will count: its
    reply may be late, rejected or lost. The next visit says which version to continue from.

    Args:
        records: `context.state` of the node. It lasts as long as the node's process and the run.
        folder: folder where state outlives the process and the run, or None.
        days: state of another training is deleted if it was not written for this many days. A
            paused training can continue until then. If it continues later, its clients start with
            new state and report that.
    """

    def __init__(
        self, records: RecordDict, folder: Path | None = None, days: float = RETENTION_DAYS
    ) -> None:
        self.records, self.folder, self.days = records, folder, days

    @classmethod
    def from_context(cls, context: Context) -> ClientStateStore:
        """Returns the store of a node, as configured by its `memory-dir` and `memory-days`."""
        folder = context.node_config.get("memory-dir")
        days = context.node_config.get("memory-days", RETENTION_DAYS)
        if isinstance(days, bool) or not isinstance(days, (int, float)) or not days >= 0:
            raise InputError(f"memory-days must be a number of days, 0 or more; got {days!r}.")
        return cls(context.state, Path(str(folder)).expanduser() if folder else None, float(days))

    def load(self, visit: Visit) -> Tree | None:
        """Returns the state after the last round that counted, or None if it is lost."""
        name = _record_name(visit, visit.counted)
        if name in self.records:
            return unpack(self.records, name)
        if self.folder is None:
            return None
        try:
            return read_checkpoint(self._path(name))[0]
        except StoreError:
            return None

    def save(self, visit: Visit, state: Tree) -> None:
        """Saves the state after a visit and deletes versions that can no longer count."""
        new, counted = _record_name(visit, visit.round), _record_name(visit, visit.counted)
        this_training = f"{PREFIX}/{visit.training}/"
        this_mode = f"{this_training}{visit.mode}/"
        for name in [name for name in self.records if name.startswith(f"{PREFIX}/")]:
            if name != counted and (
                name.startswith(this_mode) or not name.startswith(this_training)
            ):
                del self.records[name]
        self.records[new] = pack(state)
        if self.folder is not None:
            self.create_private_folder(PREFIX)
            write_checkpoint(self._path(new), state, {}, private=True)
            for path in self._path(new).parent.glob("*.safetensors"):
                if path not in (self._path(new), self._path(counted)):
                    path.unlink(missing_ok=True)
            clean_leftovers(self._path(new).parent)

    def delete_expired(self, training: str) -> None:
        """Deletes state of other trainings on disk that was not written for `days`."""
        if self.folder is None or not (self.folder / PREFIX).is_dir():
            return
        oldest = time.time() - self.days * 24 * 3600
        with suppress(OSError):  # a visit must not fail because of cleaning up
            for folder in (self.folder / PREFIX).iterdir():
                if folder.name == training or folder.is_symlink() or not folder.is_dir():
                    continue
                # Delete a folder only if it holds nothing but our own files: an operator may have
                # pointed `memory-dir` at a folder with other data.
                contents = list(folder.rglob("*"))
                only_ours = all(
                    path.is_dir() or path.suffix in (".safetensors", ".part") for path in contents
                )
                if only_ours and max(path.stat().st_mtime for path in (folder, *contents)) < oldest:
                    shutil.rmtree(folder, ignore_errors=True)

    def create_private_folder(self, name: str) -> Path:
        """Creates a folder for this user alone, and makes an existing one private; returns it."""
        assert self.folder is not None
        folder = self.folder / name
        try:
            make_folders(folder, private=True)
            make_private(folder)
        except OSError as error:
            raise StoreError(
                f"memory-dir {self.folder} cannot be used: {describe_os_error(error)}"
            ) from None
        return folder

    def _path(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{name}.safetensors"


def _record_name(visit: Visit, round: int) -> str:
    return f"{PREFIX}/{visit.training}/{visit.mode}/{round}"
