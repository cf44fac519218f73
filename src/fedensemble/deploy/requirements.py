"""Packages that every machine of a fleet needs: the app's file requirements.txt.

The app installs nothing when it runs, so each machine compares this file with what is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from ..config.packages import find_packages
from ..errors import InputError
from ..version import VERSION

FILE = "requirements.txt"
_FLOWER_RANGE = "flwr>=1.41,<1.43"  # that of the extra "flower"


def list_requirements(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns each requirement of an app with its reason, for pip and for messages.

    Args:
        values: of the app's config.
    """
    try:
        major, minor, *_ = version("flwr").split(".")
        # SuperLink and SuperNodes must have the same major and minor version.
        flower = f"flwr=={major}.{minor}.*"
    except PackageNotFoundError:  # an app can be written without Flower
        flower = _FLOWER_RANGE
    packages: dict[tuple[str, str], list[str]] = {}
    for plug_in, package in find_packages(values).items():
        packages.setdefault(package, []).append(plug_in)
    return [
        (f"fedensemble[flower]=={VERSION}", ""),
        (flower, ""),
        *(
            (f"{name}=={number}", f"provides the {' and the '.join(plug_ins)}")
            for (name, number), plug_ins in packages.items()
        ),
    ]


def format_requirements(requirements: list[tuple[str, str]]) -> str:
    """Returns the text of requirements.txt."""
    lines = [f"{text}  # {reason}" if reason else text for text, reason in requirements]
    return "\n".join(["# Every machine of the fleet needs these, the server too.", *lines, ""])


def check_requirements(folder: Path) -> None:
    """Raises InputError if this machine lacks a package of an app, or has another version of it."""
    file = folder / FILE
    if not file.exists():  # deleted by somebody who manages versions in another way
        return
    problems = []
    for line in file.read_text(encoding="utf-8").splitlines():
        text, _, reason = (part.strip() for part in line.partition("#"))
        if not text:
            continue
        try:
            requirement = Requirement(text)
        except InvalidRequirement as error:
            raise InputError(f"{file}: '{text}' is not a requirement of pip: {error}.") from None
        if problem := _problem(requirement):
            problems.append(f"{problem}{f', which {reason}' * bool(reason)}")
    if problems:
        raise InputError(
            f"This machine cannot run the app: {'; '.join(problems)}. Install what "
            f"fleet/{FILE} of the app lists on every machine, the server and all clients."
        )


def _problem(requirement: Requirement) -> str:
    name = requirement.name
    try:
        # The metadata of an editable installation can be older than its code.
        installed = VERSION if name == "fedensemble" else version(name)
    except PackageNotFoundError:
        return f"the package {name}{requirement.specifier} is not installed"
    if requirement.specifier.contains(installed, prereleases=True):
        return ""
    return f"{name} {installed} is installed where {name}{requirement.specifier} is needed"
