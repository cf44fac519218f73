"""Implements `fedensemble new`."""

from __future__ import annotations

from pathlib import Path

from ...scaffold.create import create_project
from ...scaffold.trusted import trust
from ..console import print_line


def new_project(folder: Path) -> None:
    """Writes a project, and prints what to do next."""
    create_project(folder)
    found = trust(folder)
    print_line(f"{folder}: model, data, config, tests and a Flower app.")
    print_line("Next:")
    print_line(f"  cd {folder}")
    if not found:
        print_line("  pip install --no-build-isolation --no-deps -e .")
    print_line("  pytest")
    print_line("  fedensemble run config.toml")
