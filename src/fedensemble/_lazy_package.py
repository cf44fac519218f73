"""The class of the module `fedensemble`: a public name is imported when it is first used."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

# Public names that subpackages have, too: `fe.schedules` is the registry, `fe.report` a function.
# `from fedensemble.schedules import Stratified` still imports from the subpackage.
SHARED_NAMES = ("algorithms", "averages", "report", "schedules")


class LazyPackage(ModuleType):
    """A package whose attributes are the names of its module `public`, and its submodules."""

    def __getattr__(self, name: str) -> Any:
        """Imports an attribute; Python calls it for missing attributes only."""
        if name.startswith("_") and name != "__all__":
            raise AttributeError(f"module '{self.__name__}' has no attribute '{name}'")
        # A submodule is looked for first. `from .. import prng` in a module of the package comes
        # here, too, and must not import `public`, which may be the one that imports that module.
        if name not in SHARED_NAMES:
            submodule = f"{self.__name__}.{name}"
            try:
                return import_module(submodule)
            except ModuleNotFoundError as error:
                if error.name != submodule:  # it imports a package that is not installed
                    raise
        public = import_module(f"{self.__name__}.public")
        if name != "__all__" and name not in public.__all__:
            raise AttributeError(f"module '{self.__name__}' has no attribute '{name}'")
        value = self.__dict__[name] = getattr(public, name)  # found without this method from now on
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # Importing a subpackage binds its name in the package, which would hide a public name.
        if name not in SHARED_NAMES or not isinstance(value, ModuleType):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.__all__})
