"""The projects that this user created, whose parts commands find without an installation.

A project is code. A command may run it only if the user has said so: by installing the project, or
by creating it with `fedensemble new`, which adds its path to a list in the user's folder of
settings. A folder from somebody else that only looks like a project runs nothing.
"""

from __future__ import annotations

import json
import os
import sys
import tomllib
from collections.abc import Iterable, Mapping
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from typing import Any

import click

from .. import durable
from ..errors import StoreError

FILE = "projects.json"
_GROUPS = "fedensemble."  # beginning of the names of our entry-point groups


def trust(folder: Path) -> bool:
    """Adds a project to the list; returns whether that was possible."""
    file = _list_file()
    try:
        durable.write_bytes(
            file, durable.json_bytes(sorted({*_trusted(file), str(folder.resolve())})), private=True
        )
    except StoreError:  # no folder of settings, or a read-only one
        return False
    return True


def activate_project(start: Path) -> Path | None:
    """Makes the parts of the project around a folder known, if this user created the project.

    Returns:
        the project's folder, or None if there is no such project.
    """
    trusted = _trusted(_list_file())
    if not trusted:
        return None
    folder = start.resolve()
    for root in (folder, *folder.parents):
        if str(root) in trusted:
            return _activate(root)
    return None


def _activate(root: Path) -> Path | None:
    try:
        # The path may have been deleted and made again by somebody else, as in /tmp.
        if hasattr(os, "getuid") and root.stat().st_uid != os.getuid():
            return None
        values = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    project = values.get("project")
    if not isinstance(project, Mapping) or not isinstance(project.get("name"), str):
        return None
    sys.path.append(str(root))  # last, so that it hides no installed package
    sys.meta_path.append(_ProjectFinder(_Project(project, root)))
    return root


def _list_file() -> Path:
    return Path(click.get_app_dir("fedensemble")) / FILE


def _trusted(file: Path) -> list[str]:
    """Returns the paths in the list; none if the file is missing or damaged."""
    try:
        paths = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return []
    return [path for path in paths if isinstance(path, str)] if isinstance(paths, list) else []


class _Project(Distribution):
    """A project as `importlib.metadata` sees an installed package.

    Args:
        project: the table [project] of its pyproject.toml.
        root: its folder.
    """

    def __init__(self, project: Mapping[str, Any], root: Path) -> None:
        self._project, self._root = project, root

    def read_text(self, filename: str) -> str | None:
        if filename == "METADATA":
            number = self._project.get("version", "0")
            return f"Metadata-Version: 2.1\nName: {self._project['name']}\nVersion: {number}\n"
        if filename == "entry_points.txt":
            return "".join(
                f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
                for group, points in self._project.get("entry-points", {}).items()
                if group.startswith(_GROUPS)
            )
        return None

    def locate_file(self, path: Any) -> Any:
        return self._root / path


class _ProjectFinder(DistributionFinder):
    """Finds the metadata of one project; its modules are found on `sys.path`."""

    def __init__(self, project: _Project) -> None:
        self._project = project

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        return None

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterable[Distribution]:
        wanted = None if context is None else context.name
        own = self._project.name
        same = wanted is not None and _normalized(wanted) == _normalized(own)
        return [self._project] if wanted is None or same else []


def _normalized(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")
