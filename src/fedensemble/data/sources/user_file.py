"""Files and folders of the user: which datasets read them, and where they are looked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import DataError
from ..dataset import data_folder

# Datasets whose files the user may change between two runs.
USER_FILES = ("npz", "table")


def knows_clients(settings: Mapping[str, Any]) -> bool:
    """Whether a table `[data]` says which client has which example, so that none need be drawn."""
    return settings.get("source") == "table" and settings.get("client") is not None


def find_path(dataset: str, path: Path | str, root: Path | None, *, folder: bool = False) -> Path:
    """Returns `path`, or `path` relative to the data folder, whichever exists.

    Args:
        dataset: for the message.
        root: data folder; None for the usual one.
        folder: whether a folder is looked for.
    """
    path = Path(path).expanduser()
    places = [path] if path.is_absolute() else [path, data_folder(root) / path]
    for place in places:
        if "\0" not in str(place) and (place.is_dir() if folder else place.is_file()):
            return place
    searched = ", ".join(str(place) for place in places)
    kind = "folder" if folder else "file"
    raise DataError(
        f"Dataset '{dataset}' needs the {kind} {path.name or path}, which is missing. Looked for "
        f"{searched}. Give its path, or set FEDENSEMBLE_DATA to the folder that has it."
    )
