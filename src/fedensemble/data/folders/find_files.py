"""The files of a folder, and those of one subfolder per class."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...errors import DataError
from ..dataset import Rows

# Names of parts of a dataset, which are no classes.
PARTS = frozenset({"train", "training", "test", "testing", "val", "valid", "validation", "dev"})


@dataclass(frozen=True, eq=False)
class LabelledFiles:
    """Files with the classes of their subfolders.

    Args:
        folder: of the subfolders.
        names: paths relative to the folder, with slashes.
        label: index of the class of each file, [n].
        classes: names of the subfolders: sorted, or in the order of numbers if all are numbers.
        ignored: files in the subfolders that are of another kind.
    """

    folder: Path
    names: tuple[str, ...]
    label: Rows
    classes: tuple[str, ...]
    ignored: tuple[str, ...]

    @property
    def paths(self) -> list[Path]:
        """The path of each file."""
        return [self.folder / name for name in self.names]

    def ordered(self, classes: Sequence[str] | None) -> LabelledFiles:
        """Returns the files with classes numbered in this order; None leaves them as they are."""
        if classes is None:
            return self
        extra = [name for name in self.classes if name not in classes]
        if extra:
            raise DataError(
                f"{self.folder} has the subfolder '{extra[0]}', which is not among class_names "
                f"({', '.join(classes)}). Add it, or remove the subfolder."
            )
        number = np.array([list(classes).index(name) for name in self.classes], np.int64)
        return replace(self, label=number[self.label], classes=tuple(classes))

    def as_test(self, classes: Sequence[str]) -> LabelledFiles:
        """Returns the files with the classes of the training files; raises for other classes."""
        extra = [name for name in self.classes if name not in classes]
        if extra:
            raise DataError(
                f"{self.folder} has the subfolder '{extra[0]}', and the classes of the training "
                f"files are {', '.join(classes)}. Remove it, or rename it."
            )
        return self.ordered(classes)


def find_files(folder: Path, suffixes: Collection[str]) -> tuple[list[str], list[str]]:
    """Returns the sorted files of these kinds below a folder, and the other files.

    Hidden files and folders, and the files that desktops leave behind, are neither.

    Args:
        suffixes: in lower case, such as ".png".
    """
    found: list[str] = []
    others: list[str] = []
    for place, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__MACOSX")))
        for name in files:
            if name.startswith(".") or name in ("Thumbs.db", "desktop.ini"):
                continue
            relative = Path(place, name).relative_to(folder).as_posix()
            (found if Path(name).suffix.lower() in suffixes else others).append(relative)
    return sorted(found), sorted(others)


def find_labelled_files(folder: Path, suffixes: Collection[str], what: str) -> LabelledFiles:
    """Returns the files of one subfolder per class; raises if the folder is arranged otherwise.

    Args:
        suffixes: of the files, in lower case.
        what: the files are, in the plural, for messages.
    """
    kinds = ", ".join(sorted(suffixes))
    try:
        classes = sorted(
            path.name for path in folder.iterdir() if path.is_dir() and path.name[0] not in "._"
        )
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror}.") from None
    if not classes:
        raise DataError(
            f"{folder} has no subfolders, and their names are the classes. Arrange the {what} as "
            f"{folder.name}/CLASS/FILE ({kinds})."
        )
    if len(classes) > 1 and {name.lower() for name in classes} <= PARTS:
        train, *others = sorted(classes, key=lambda name: not name.lower().startswith("train"))
        raise DataError(
            f"{folder} has the subfolders {' and '.join(classes)}, which are parts of a dataset, "
            f"not classes. Set path = '{folder / train}' and test_path = '{folder / others[0]}'."
        )
    if all(name.isdecimal() and name.isascii() for name in classes):
        classes.sort(key=lambda name: (int(name), name))
    names: list[str] = []
    label: list[int] = []
    ignored: list[str] = []
    for index, name in enumerate(classes):
        found, others = find_files(folder / name, suffixes)
        if not found:
            raise DataError(
                f"The folder {folder / name} of class '{name}' has no {what} ({kinds}). Put some "
                "into it, or remove it."
            )
        names += [f"{name}/{file}" for file in found]
        label += [index] * len(found)
        ignored += [f"{name}/{file}" for file in others]
    return LabelledFiles(
        folder, tuple(names), np.array(label, np.int64), tuple(classes), tuple(ignored)
    )


def note_ignored(ignored: Collection[str], what: str) -> list[str]:
    """Returns a sentence on files of another kind; none if there are none."""
    if not ignored:
        return []
    first, more = next(iter(ignored)), len(ignored) - 1
    listed = first + (f" and {more} more" if more else "")
    return [f"Files that are no {what} are left out: {listed}."]
