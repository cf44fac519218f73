"""What a client keeps for each mode: in Flower's own state of the node and, where it has a folder, on its disk."""

from __future__ import annotations

from pathlib import Path

from flwr.app import RecordDict

from ...checkpoint import read_checkpoint, write_checkpoint
from ...errors import StoreError
from ...vectors import Tree
from .wire import Visit, pack, unpack


class KeptMemory:
    """Memory by mode and round: the one that counted last, and the one after it, which may yet come to count.

    Args:
        records: the node's `context.state`; it lasts as long as the node's process and the run.
        folder: where memory outlives both, or None.
    """

    def __init__(self, records: RecordDict, folder: Path | None = None) -> None:
        self.records, self.folder = records, folder

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
        others = f"memory/{visit.training}/{visit.mode}/"
        for name in [name for name in self.records if name.startswith("memory/")]:
            if name != counted and (name.startswith(others) or not name.startswith(f"memory/{visit.training}/")):
                del self.records[name]
        self.records[fresh] = pack(memory)
        if self.folder is not None:
            write_checkpoint(self._file(fresh), memory, {})
            for path in self._file(fresh).parent.glob("*.safetensors"):
                if path not in (self._file(fresh), self._file(counted)):
                    path.unlink(missing_ok=True)

    def _file(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{name}.safetensors"


def _name(visit: Visit, round: int) -> str:
    return f"memory/{visit.training}/{visit.mode}/{round}"
