"""A disk that records every write step of a run, and the files left by a failure at each step.

Each step is applied to the real disk, and to a model in memory of two states: what processes see,
and what has been synced. A kill leaves the first state; a power cut leaves the second, or anything
in between.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path

from fedensemble.durable import Disk

Tree = dict[str, bytes | None]  # content by path relative to the root; None for a folder
CUTS = ("kill", "lost", "names-only", "data-only", "half", "mixed-1", "mixed-2", "mixed-3")


def SEEN() -> float:  # noqa: N802
    """What processes see."""
    return 1.0


def SYNCED() -> float:  # noqa: N802
    """What survives in any case."""
    return 0.0


@dataclass
class File:
    """A file without its names: what processes see, and what would survive."""

    seen: bytes = b""
    synced: bytes = b""


@dataclass
class Folder:
    """A folder's names, for processes and after a power cut."""

    seen: dict[str, "File | Folder"] = field(default_factory=dict)
    synced: dict[str, "File | Folder"] = field(default_factory=dict)


class QuickDisk(Disk):
    """A disk that syncs nothing: a test cannot lose power, and syncs take most of its time."""

    def sync(self, descriptor):
        pass

    def sync_folder(self, path):
        pass


class SimulatedDisk(QuickDisk):
    """Carries out steps below a folder and keeps, for each, the states in which it could end there.

    Args:
        root: the folder; it must be empty or hold what `tree` says, and all that is synced.
    """

    def __init__(self, root: Path, tree: Tree | None = None) -> None:
        self.root, self.top = root, Folder()
        self.open: dict[int, File] = {}
        self.steps: list[str] = []
        self.states: list[dict[str, Tree]] = []
        for name, content in sorted((tree or {}).items()):
            holder, last = self._holder(root / name)
            holder.seen[last] = holder.synced[last] = (
                Folder() if content is None else File(content, content)
            )

    def make_folder(self, path, mode=0o777):
        self._note(f"mkdir {path.name}")
        super().make_folder(path, mode)
        holder, name = self._holder(path)
        holder.seen.setdefault(name, Folder())

    def create(self, path, mode=0o666):
        self._note(f"create {path.name}")
        return self._opened(path, super().create(path, mode))

    def open_end(self, path):
        self._note(f"append {path.name}")
        return self._opened(path, super().open_end(path))

    def write(self, descriptor, content):
        held = bytes(content)
        half = len(held) // 2
        for piece in (held[:half], held[half:]):  # it may end in between, too
            self._note("write")
            super().write(descriptor, piece)
            self.open[descriptor].seen += piece

    def sync(self, descriptor):
        self._note("fsync")
        self.open[descriptor].synced = self.open[descriptor].seen

    def sync_folder(self, path):
        self._note(f"fsync folder {path.name}")
        folder = self._at(path)
        if folder is not None:
            folder.synced = dict(folder.seen)

    def rename(self, source, target):
        self._note(f"rename to {target.name}")
        super().rename(source, target)
        holder, name = self._holder(source)
        moved = holder.seen.pop(name)
        holder, name = self._holder(target)
        holder.seen[name] = moved

    def remove(self, path):
        self._note(f"remove {path.name}")
        super().remove(path)
        holder, name = self._holder(path)
        holder.seen.pop(name, None)

    def end(self) -> None:
        """Notes the state after the last step."""
        self._note("end")

    def _note(self, step: str) -> None:
        """Before a step: what would be left if everything ended here."""
        assert self.tree(self.top, SEEN, SEEN) == read_tree(self.root), f"bypassed before {step}"
        self.steps.append(step)
        cuts = {
            "kill": (SEEN, SEEN),
            "lost": (SYNCED, SYNCED),  # everything that was not synced
            # names reach the disk before data, as with delayed allocation
            "names-only": (SEEN, SYNCED),
            "data-only": (SYNCED, SEEN),
            "half": (SEEN, lambda: 0.5),
        }
        draw = random.Random(len(self.steps))
        cuts |= {
            cut: (lambda: draw.choice((0.0, 1.0)), draw.random)
            for cut in CUTS
            if cut.startswith("mixed")
        }
        self.states.append({cut: self.tree(self.top, *how) for cut, how in cuts.items()})

    def tree(self, folder, names, data, prefix="") -> Tree:
        """The files of a state.

        Args:
            names, data: called for each name and each file, how much of what is not synced is
                there, from 0 to 1.
        """
        found: Tree = {}
        for name in sorted({*folder.seen, *folder.synced}):
            held = (folder.seen if names() else folder.synced).get(name)
            if isinstance(held, Folder):
                found[f"{prefix}{name}"] = None
                found |= self.tree(held, names, data, f"{prefix}{name}/")
            elif isinstance(held, File):
                more = len(held.seen) - len(held.synced)
                found[f"{prefix}{name}"] = held.seen[: len(held.synced) + round(data() * more)]
        return found

    def _opened(self, path, descriptor):
        holder, name = self._holder(path)
        self.open[descriptor] = holder.seen.setdefault(name, File())
        return descriptor

    def _at(self, path) -> Folder | None:
        parts = path.relative_to(self.root).parts if path.is_relative_to(self.root) else None
        if parts is None:
            return None
        folder = self.top
        for part in parts:
            folder = folder.seen[part]
        return folder

    def _holder(self, path) -> tuple[Folder, str]:
        return self._at(path.parent), path.name


def read_tree(root: Path) -> Tree:
    """All files below a folder but locks, which are no part of a run's state."""
    found = {str(path.relative_to(root)): path for path in root.rglob("*") if path.name != ".lock"}
    return {name: None if path.is_dir() else path.read_bytes() for name, path in found.items()}


def write_tree(root: Path, tree: Tree) -> None:
    """Makes a folder with these files."""
    root.mkdir(parents=True)
    for name, content in sorted(tree.items()):
        if content is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(content)


def frozen(tree: Tree) -> tuple[tuple[str, bytes | None], ...]:
    """A tree as the key of a dict."""
    return tuple(sorted(tree.items()))
