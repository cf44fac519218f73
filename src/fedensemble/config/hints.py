"""Hints for unknown keys: where in a config a key of that name is, such as `algorithm.lr`."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from ..errors import InputError
from .plugin_tables import Table
from .plugins import PLUGIN_TABLES

# Names that papers and other libraries use for settings of ours; in lower case.
SYNONYMS = {
    "k": "ensemble.modes",
    "models": "ensemble.modes",
    "num_modes": "ensemble.modes",
    "q": "ensemble.strata",
    "share": "ensemble.shared",
    "shared_parameters": "ensemble.shared",
    "m": "ensemble.clients_per_round",
    "fraction_fit": "ensemble.clients_per_round",
    "n": "data.clients",
    "num_clients": "data.clients",
    "dataset": "data.source",
    "t": "rounds",
    "num_rounds": "rounds",
    "communication_rounds": "rounds",
    "e": "training.epochs",
    "local_epochs": "training.epochs",
    "b": "training.batch_size",
    "eta": "algorithm.lr",
    "learning_rate": "algorithm.lr",
    "method": "algorithm.name",
    "strategy": "algorithm.name",
}


def config_keys() -> dict[str, tuple[str, ...]]:
    """Returns all keys of a config, each with the names of the plug-ins that have it.

    The names are empty for a key that does not depend on a plug-in, or that all plug-ins of its
    table have.
    """
    from .schema import Config  # it imports this module

    keys: dict[str, tuple[str, ...]] = dict.fromkeys(_fields(Config), ())
    for section in PLUGIN_TABLES:
        names_at, path = ".".join(section.names_at), ".".join(section.path)
        keys |= {f"{names_at}.{choice.key}": () for choice in section.choices}
        keys |= {f"{path}.{option}": () for option in section.common}
        for choice in section.choices:
            owners: dict[str, list[str]] = {}
            for name in choice.registry:
                try:
                    for option in choice.options(name):
                        owners.setdefault(f"{path}.{option}", []).append(name)
                except InputError:  # a plug-in of another package that cannot be imported
                    continue
            everywhere = len(list(choice.registry))
            for key, names in owners.items():
                keys.setdefault(key, () if len(names) == everywhere else tuple(names))
    return keys


def _fields(table: type[Table], prefix: str = "") -> list[str]:
    """Returns the dotted keys of a table and of the tables in it."""
    keys = []
    for name, field in table.model_fields.items():
        kind = field.annotation
        nested = isinstance(kind, type) and issubclass(kind, Table)
        keys += _fields(kind, f"{prefix}{name}.") if nested else [f"{prefix}{name}"]  # type: ignore[arg-type]
    tables = {section.path[0] for section in PLUGIN_TABLES}
    return [key for key in keys if key not in tables]  # their keys are those of the plug-ins


def suggest_keys(path: Sequence[str], known: Sequence[str]) -> list[str]:
    """Returns keys that the user of an unknown key may have meant, best first.

    Args:
        path: of the unknown key, such as ("training", "lr").
        known: keys of the table at that path.

    >>> suggest_keys(("lr",), ["seed", "rounds"]), suggest_keys(("training", "K"), ["epochs"])
    (["'algorithm.lr'"], ["'ensemble.modes'"])
    >>> suggest_keys(("mu",), [])
    ["'algorithm.mu' (of fedac, fedprox)"]
    """
    keys, name = config_keys(), path[-1].lower().replace("-", "_")
    leaves: dict[str, list[str]] = {}
    for key in keys:
        leaves.setdefault(key.rpartition(".")[2].lower(), []).append(key)
    similar = get_close_matches(path[-1], known, n=1)
    found = leaves.get(name, []) + ([SYNONYMS[name]] if name in SYNONYMS else [])
    if not found and not similar:
        found = [key for leaf in get_close_matches(name, leaves, n=1) for key in leaves[leaf]]
    # At the top level, a table with a similar name is a worse guess than a key of the same name:
    # `modes` means ensemble.modes, and not the table `model`.
    local = [f"'{key}'" for key in similar] if len(path) > 1 or not found else []
    same_table_first = sorted(dict.fromkeys(found), key=lambda key: key.split(".")[0] != path[0])
    return local + [_show(key, keys[key], ".".join(path)) for key in same_table_first]


def _show(key: str, plugins: Sequence[str], unknown_key: str) -> str:
    """Returns a key as a part of the question "did you mean ...?"."""
    names = ", ".join(plugins)
    if key == unknown_key:  # the right table, but with the name of another plug-in
        return f"the option '{key.rpartition('.')[2]}' of {names}"
    return f"'{key}' (of {names})" if names else f"'{key}'"
