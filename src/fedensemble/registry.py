"""Registries of plug-ins by name: algorithms, schedules, engines, models, datasets, partitions."""

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .errors import InputError, first_line, unknown

T = TypeVar("T")


class Registry(Generic[T]):
    """A mapping from names to plug-ins of one kind, open to other packages.

    Another package adds its own plug-ins with the entry-point group `fedensemble.<kind>s`. An entry
    point is imported when its name is first looked up. A registered class is also an attribute
    under its own name: `fe.algorithms.FedBE` is `fe.algorithms["fedbe"]`.

    Args:
        kind: what is registered, for messages and for the entry-point group.
        base: returns the class that items must be subclasses of; None accepts anything. It is a
            function because that class is usually defined after its registry.
        builtins: subpackage whose import registers the plug-ins of this package. The first lookup
            imports it, so that a registry is complete however its module was imported.

    >>> colors: Registry[int] = Registry("color")
    >>> _ = colors.register("red")(0xFF0000)
    >>> colors["red"] == 0xFF0000, list(colors)
    (True, ['red'])
    """

    def __init__(
        self, kind: str, base: Callable[[], type] | None = None, builtins: str | None = None
    ) -> None:
        self.kind, self._base, self._builtins = kind, base, builtins
        self._items: dict[str, T] = {}
        self._external: dict[str, Any] | None = None

    def register(self, name: str) -> Callable[[T], T]:
        """A decorator that registers a function or class under `name`."""

        def add(item: T) -> T:
            self._check(item, name)
            # A name that a built-in plug-in has is refused here, where the user wrote it, and not
            # when the built-in plug-ins are imported. They themselves register during that import.
            if not str(getattr(item, "__module__", "")).startswith(f"{__package__}."):
                self._load_builtins()
            if name in self._items and self._items[name] is not item:
                raise InputError(
                    f"The {self.kind} name '{name}' is already registered for "
                    f"{self._items[name]!r}; choose another."
                )
            self._items[name] = item
            return item

        return add

    def __getitem__(self, name: str) -> T:
        if not isinstance(name, str):
            raise InputError(
                f"The name of {self.kind}s is text, such as '{next(iter(self))}'; got {name!r}."
            )
        self._load_builtins()
        if name not in self._items and name in self._entry_points():
            self._items[name] = self._load(name)
        if name not in self._items:
            raise InputError(unknown(self.kind, name, self))
        return self._items[name]

    # Hidden from type checkers, which would otherwise accept every attribute of a registry.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The registered class with this name; Python calls it for missing attributes only."""
            if not name.startswith("_"):
                self._load_builtins()
                for item in self._items.values():
                    if isinstance(item, type) and item.__name__ == name:
                        return item
            raise AttributeError(
                f"The registry of {self.kind}s has no attribute '{name}', and no {self.kind} with "
                f"that class name is registered. Write {self.kind}s['name'] with one of: "
                f"{', '.join(self._items)}."
            )

    def __iter__(self) -> Iterator[str]:
        self._load_builtins()
        return iter(sorted({*self._items, *self._entry_points()}))

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        self._load_builtins()
        return name in self._items or name in self._entry_points()

    def build(self, spec: Any) -> Any:
        """A registered class called with its options: "adam" or {"name": "adam", "beta1": 0.8}.

        Anything but a name or a dict, such as an object that exists already, is returned as it is.
        """
        if not isinstance(spec, (str, Mapping)):
            return spec
        # Imported here, because it loads torch, and commands that only print must not.
        from .arguments import check_names

        options = {"name": spec} if isinstance(spec, str) else dict(spec)
        if "name" not in options:
            raise InputError(
                f"A dict that describes the {self.kind} needs its name, such as "
                f"{{'name': '{next(iter(self))}'}}; got {options!r}."
            )
        name = options.pop("name")
        item: Any = self[name]
        check_names(f"{self.kind} '{name}'", item, options)
        return item(**options)

    def name_of(self, item: T) -> str | None:
        """The name under which `item` is registered, or None."""
        for name in self:
            try:
                if self[name] is item:
                    return name
            except InputError:  # a plug-in that cannot be loaded, so it is not `item`
                continue
        return None

    def _load_builtins(self) -> None:
        """Imports the built-in plug-ins, once.

        A lookup during that import sees the plug-ins that are registered so far.
        """
        if self._builtins is not None:
            import_module(f"{__package__}.{self._builtins}")
            self._builtins = None

    def package(self, name: str) -> tuple[str, str] | None:
        """Name and version of the package that adds a plug-in; None if there is no such package."""
        point = self._entry_points().get(name)
        dist = None if point is None else point.dist
        return None if dist is None else (dist.name, dist.version)

    def _load(self, name: str) -> T:
        """The plug-in of another package; raises InputError if importing it fails.

        Plug-ins are loaded one by one, so a broken package does not affect the others.
        """
        point = self._entry_points()[name]
        try:
            return point.load()  # type: ignore[no-any-return]
        except Exception as error:  # another package may raise anything
            owner = point.dist.name if point.dist is not None else point.value
            raise InputError(
                f"The {self.kind} '{name}' of package '{owner}' cannot be loaded: "
                f"{type(error).__name__}: {first_line(error)}. Repair or uninstall that package."
            ) from error

    def _check(self, item: T, name: str) -> None:
        """Raises unless `item` is a subclass of the registry's base class."""
        base = None if self._base is None else self._base()
        if base is not None and not (isinstance(item, type) and issubclass(item, base)):
            raise InputError(
                f"The {self.kind} '{name}' must be a subclass of {base.__name__}; got {item!r}."
            )

    def _entry_points(self) -> dict[str, Any]:
        """Entry points of other packages by name; read once, because it scans all packages."""
        if self._external is None:
            self._external = {
                point.name: point for point in entry_points(group=f"fedensemble.{self.kind}s")
            }
        return self._external
