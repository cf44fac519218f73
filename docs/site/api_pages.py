"""Pages of the API: one per public module and one per public name, from each module's `__all__`."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from abc import ABC
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

from docstrings import as_rst

import fedensemble
from fedensemble.registry import Registry

_INTERNAL = {"checkpoint_file", "public"}  # their names are for the package, or `fedensemble`'s
_KINDS = ("Classes", "Functions", "Registries and constants", "Errors and warnings")


def public_modules() -> list[ModuleType]:
    """Returns the package, and its modules one level below that declare an `__all__`."""
    names = [module.name for module in pkgutil.iter_modules(fedensemble.__path__)]
    modules = [
        importlib.import_module(f"fedensemble.{name}")
        for name in names
        if name not in _INTERNAL and not name.startswith("_")
    ]
    return [fedensemble, *(module for module in modules if hasattr(module, "__all__"))]


def home_of_names() -> dict[tuple[str, str], str]:
    """Returns the module on whose pages a public name is described, by module and name.

    An object that several modules offer is described once: by the first, so that `fedensemble`
    comes before `fedensemble.algorithms`.
    """
    homes: dict[tuple[str, str], str] = {}
    first: dict[int, str] = {}
    for module in public_modules():
        for name in module.__all__:
            home = first.setdefault(id(getattr(module, name)), _path(module, name))
            homes[module.__name__, name] = home
    return homes


def collect() -> dict[PurePosixPath, str | Path]:
    """Returns the pages in reStructuredText, by path."""
    homes = home_of_names()
    own = {
        module: [
            name for name in _sorted(module) if homes[module.__name__, name] == _path(module, name)
        ]
        for module in public_modules()
    }
    modules = [module for module, names in own.items() if names]
    taken = {module.__name__ for module in modules}
    pages: dict[PurePosixPath, str | Path] = {}
    for module in modules:
        # The registry `fedensemble.algorithms` is on the page of the module with the same name.
        names = [name for name in own[module] if _path(module, name) not in taken]
        pages[PurePosixPath(f"api/{module.__name__}.rst")] = _module_page(module, names, homes)
        for name in names:
            pages[PurePosixPath(f"api/{_path(module, name)}.rst")] = _name_page(module, name)
    pages[PurePosixPath("api/index.rst")] = _index_page(modules)
    return pages


def _path(module: ModuleType, name: str) -> str:
    return f"{module.__name__}.{name}"


def _index_page(modules: list[ModuleType]) -> str:
    text = _title("API")
    text += (
        "All public names, from the docstrings of the code. :doc:`/ref-python` introduces them in"
        " order of use.\n\n.. toctree::\n   :hidden:\n\n"
    )
    text += "".join(f"   {module.__name__}\n" for module in modules)
    rows = [(f":doc:`{module.__name__}`", _first_line(module)) for module in modules]
    return f"{text}\n{_table(rows)}"


def _module_page(module: ModuleType, own: list[str], homes: dict[tuple[str, str], str]) -> str:
    path = module.__name__
    text = _title(path) + f".. automodule:: {path}\n   :no-members:\n\n"
    registry = getattr(fedensemble, path.rpartition(".")[2], None)
    if isinstance(registry, Registry):
        text += _registry_text(path.rpartition(".")[2], registry) + "\n\n"
    for kind in _KINDS:
        names = [name for name in _sorted(module) if _kind(getattr(module, name)) == kind]
        if names:
            rows = [(f":py:obj:`~{homes[path, name]}`", _summary(module, name)) for name in names]
            text += f"{kind}\n{'-' * len(kind)}\n\n{_table(rows)}\n"
    links = "".join(f"   {name} <{path}.{name}>\n" for name in own)
    return f"{text}.. toctree::\n   :hidden:\n\n{links}"


def _name_page(module: ModuleType, name: str) -> str:
    value, path = getattr(module, name), _path(module, name)
    text = _title(name)
    if inspect.isclass(value):
        bases = "" if set(value.__bases__) <= {object, ABC} else "   :show-inheritance:\n"
        return text + f".. autoclass:: {path}\n   :members:\n{bases}"
    if inspect.isroutine(value):
        return text + f".. autofunction:: {path}\n"
    if isinstance(value, Registry):
        about = _registry_text(name, value).replace("\n\n", "\n\n   ")
        return text + f".. py:data:: {path}\n   :type: Registry\n\n   {about}\n"
    return text + f".. py:data:: {path}\n   :value: {value!r}\n"


def _sorted(module: ModuleType) -> list[str]:
    return sorted(module.__all__, key=str.lower)


def _registry_text(name: str, registry: Registry[Any]) -> str:
    names = ", ".join(f"``{each}``" for each in registry if _is_built_in(registry[each]))
    return (
        f"``fe.{name}`` has the registered {registry.kind}s by name: ``{name}[...]`` returns one,"
        f' iteration yields the names, and the decorator ``@{name}.register("mine")`` adds one.\n\n'
        f"Built in: {names}. Their options are in :doc:`/ref-options`."
    )


def _is_built_in(item: object) -> bool:
    return getattr(item, "__module__", "").startswith("fedensemble.")


def _table(rows: list[tuple[str, str]]) -> str:
    lines = "".join(f"   * - {left}\n     - {right}\n" for left, right in rows)
    return f".. list-table::\n   :widths: auto\n\n{lines}"


def _summary(module: ModuleType, name: str) -> str:
    """Returns the first line of what is said about a name; constants have none."""
    value = getattr(module, name)
    if isinstance(value, Registry):
        return f"The registered {value.kind}s, by name."
    return _first_line(value) if _kind(value) != _KINDS[2] else ""


def _first_line(value: object) -> str:
    lines = (inspect.getdoc(value) or "").splitlines()
    return "".join(as_rst(lines[:1]))


def _kind(value: object) -> str:
    if inspect.isclass(value):
        return _KINDS[3] if issubclass(value, BaseException) else _KINDS[0]
    if inspect.isroutine(value):
        return _KINDS[1]
    return _KINDS[2]


def _title(text: str) -> str:
    return f"{text}\n{'=' * len(text)}\n\n"
