"""Files and folders of the user: which datasets read them, and where they are looked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import DataError
from ..dataset import data_folder

# Datasets whose files the user may change between two runs.
USER_FILES = ("npz", "table", "images", "text")


def knows_clients(settings: Mapping[str, Any]) -> bool:
    """Whether a table `[data]` says which client has which example, so that none need be drawn."""
    if settings.get("source") not in ("table", "images", "text"):
        return False
    if settings.get("client") is not None or settings.get("client_file") is not None:
        return True
    # Each file of a folder of texts is a client; a path with a suffix is one file.
    whole_texts = settings["source"] == "text" and settings.get("task", "next") == "next"
    return whole_texts and not Path(str(settings.get("path", ""))).suffix


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
