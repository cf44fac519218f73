"""Writes a new project: model, data, config, test, Flower app and README."""

from __future__ import annotations

import keyword
import re
import sys
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template

from .. import durable
from ..errors import InputError, StoreError
from ..version import VERSION

LONGEST = 50  # characters of a name
_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
# The template that `fedensemble deploy` writes. It is found by its path, because importing its
# package imports torch, which takes seconds.
_APP = files("fedensemble") / "deploy" / "template"
# The files of a project and their templates; {package} is the project's Python package.
_FILES = {
    "README.md": "README.md",
    "config.toml": "config.toml",
    ".gitignore": "gitignore",
    "{package}/__init__.py": "init.py",
    "{package}/data.py": "data.py",
    "{package}/model.py": "model.py",
    "tests/test_{package}.py": "test_project.py",
    "fleet/config.toml": "fleet_config.toml",
    "fleet/requirements.txt": "fleet_requirements.txt",
    "fleet/data.py": "fleet_data.py",
    "pyproject.toml": "pyproject.toml",
}
# Files of `fedensemble deploy` that register the project's parts first.
_APP_FILES = ("server_app.py", "client_app.py")


def create_project(folder: Path) -> None:
    """Writes a project into a new folder, whose name is the name of the project.

    Raises:
        InputError: the name is not one that a Python package can have, or is taken.
        StoreError: the folder exists, or cannot be written.
    """
    name = folder.name
    package = package_name(name)
    values = {"name": name, "package": package, "version": VERSION}
    values["flower"] = _app_settings(name)
    try:
        durable.make_folders(folder.parent)
        folder.mkdir()  # fails if it exists, also if another process has just made it
    except FileExistsError:
        raise StoreError(
            f"{folder} exists already, and nothing was changed. Choose another name."
        ) from None
    except OSError as error:
        raise StoreError(f"Could not make {folder}: {durable.describe_os_error(error)}") from None
    template = files("fedensemble.scaffold") / "template"
    for path, source in _FILES.items():
        text = (template / f"{source}.in").read_text(encoding="utf-8")
        file = folder / path.format(package=package)
        durable.write_bytes(file, Template(text).substitute(values).encode())
    durable.write_bytes(folder / "fleet/__init__.py", (_APP / "__init__.py").read_bytes())
    for source in _APP_FILES:
        text = (_APP / source).read_text(encoding="utf-8")
        durable.write_bytes(folder / "fleet" / source, _with_import(text, package).encode())


def package_name(name: str) -> str:
    """Returns the name of a project's Python package; raises InputError if there can be none.

    >>> package_name("my-app")
    'my_app'
    """
    if not _NAME.fullmatch(name) or len(name) > LONGEST:
        raise InputError(
            f"The name of a project has at most {LONGEST} characters: lower-case letters, digits, "
            f"and single - or _ between them, such as my-app; got '{name[: LONGEST + 10]}'."
        )
    package = name.replace("-", "_")
    taken = {"fleet", "tests", *sys.stdlib_module_names}
    # A package of the same name would hide the installed one inside the project.
    if keyword.iskeyword(package) or package in taken or _is_installed(package):
        raise InputError(
            f"A project cannot be called '{name}', because '{package}' is the name of another "
            f"Python module. Choose another, such as my-{name}."
        )
    return package


def _is_installed(package: str) -> bool:
    # Not in the working directory, where `python -m fedensemble` also looks.
    path, here = sys.path, str(Path.cwd())
    try:
        sys.path = [entry for entry in path if entry not in ("", here)]
        return find_spec(package) is not None
    finally:
        sys.path = path


def _app_settings(name: str) -> str:
    """Returns the tables [tool.flwr] of an app's pyproject.toml."""
    template = (_APP / "pyproject.toml.in").read_text(encoding="utf-8")
    text = Template(template[template.index("[tool.flwr.app]") :])
    settings = text.substitute(name=name, clients=10)
    package = package_name(name)
    return settings.replace('["fleet/**",', f'["fleet/**", "{package}/**", "config.toml",').strip()


def _with_import(code: str, package: str) -> str:
    """Returns the code of an app with an import of the project's package, as a linter sorts it."""
    start = code.index("from fedensemble.deploy import")
    end = code.index("\n", start)
    return f"{code[:end]}\n\nimport {package}  # noqa: F401 (registers the model){code[end:]}"
