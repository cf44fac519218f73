"""Deletes runs, and nothing else: a folder with files that are not of a run is refused."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ... import durable
from ...errors import InputError
from ...personal.result import file_name
from ...personal.settings import METHODS
from ...tracking.backends import trackers
from ..profile import FILE as PROFILE
from .checksums import CHECKED, FILE
from .folder_lock import LOCK
from .run_folder import RunFolder, find_runs

# All that commands write into the folder of a run; a test trains, reports and profiles a run, and
# checks that it has no other files.
_FILES = {
    *CHECKED,
    FILE,
    LOCK,
    PROFILE,
    "checkpoint",
    "modes.safetensors",
    "diverged.json",
    "roster.json",
    "shift.json",
    "report.html",
    "report.md",
    "curves.png",
    *(file_name(method) for method in METHODS),  # of `fedensemble personalize`
}


def select_runs(paths: Sequence[Path], root: Path, unfinished: bool) -> list[RunFolder]:
    """Returns the runs to delete; raises if one of the paths is not the folder of a run.

    Args:
        paths: of runs.
        root: without paths, the folder whose unfinished runs are selected.
        unfinished: leave out runs that are done or have diverged.
    """
    if not paths and not unfinished:
        raise InputError(
            "Name the folders of the runs to delete, as 'fedensemble ls runs' shows them, or give "
            "--unfinished for all unfinished runs."
        )
    runs = [RunFolder(path) for path in dict.fromkeys(paths)] if paths else find_runs(root)
    runs = [run for run in runs if not unfinished or run.state == "unfinished"]
    for run in runs:
        _check_run(run)
    return runs


def _check_run(run: RunFolder) -> None:
    """Raises unless a folder is a run that holds no other files."""
    path = run.path
    if path.is_symlink():
        raise InputError(f"{path} is a link; name the folder that it leads to.")
    if not path.is_dir():
        raise InputError(f"There is no folder {path}.")
    names = {entry.name for entry in path.iterdir() if not durable.is_leftover(entry.name)}
    if "config.toml" not in names or names == {"config.toml"}:
        raise InputError(f"{path} is not a run. 'fedensemble ls runs' shows all runs.")
    if foreign := sorted(names - _FILES - _traces()):
        raise InputError(
            f"{path} holds files that are not of the run: {', '.join(foreign[:5])}. "
            "Move them elsewhere, or delete the folder yourself."
        )


def _traces() -> set[str]:
    """Returns the names of the files and folders of all trackers."""
    traces = set()
    for name in trackers:
        with suppress(InputError):  # a tracker of another package that cannot be imported
            traces.add(trackers[name].trace)
    return traces
