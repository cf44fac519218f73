"""Implements `fedensemble cite`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ...config.python_parts import python_parts, without_parts
from ...config.schema import Config, resolve
from ...config.toml import read_toml
from ...core.algorithm import algorithms
from ...errors import InputError, unknown
from ...experiment.storage.run_folder import RunFolder
from ...experiment.studies.compare import read_comparison
from ...experiment.studies.paper_table import NAMES, find_paper_table, read_reproduction
from ...report.bibliography import bibliography

# Reading a config for its algorithms must not need the device that it names.
ANY_DEVICE = ("engine.device=cpu",)


def cite(what: Sequence[str]) -> str:
    """Returns BibTeX entries of the paper, of this package, and of the algorithms of `what`.

    Args:
        what: names of algorithms or of the paper's tables, configs, comparison files, run folders.
    """
    return bibliography(name for each in what for name in _algorithms(each))


def _algorithms(what: str) -> Iterable[str]:
    """Returns the names of the algorithms that a file, a folder or a name stands for."""
    path = Path(what)
    if what in algorithms:
        return [what]
    if what in NAMES:
        return _of_reproduction(find_paper_table(what))
    if path.is_dir():
        values = RunFolder(path).read_config()
        parts = python_parts(values)  # of a federation saved from Python
        if "algorithm" in parts:
            raise InputError(
                f"The algorithm '{values['algorithm']['name']}' of {path} is not a registered one, "
                "so its reference is not known."
            )
        return [resolve(without_parts(values, *parts), what).algorithm["name"]]
    if path.suffix != ".toml" and not path.exists():
        raise InputError(
            f"{unknown('algorithm', what, algorithms)} Other arguments are TOML files, run folders "
            "and names of the paper's tables."
        )
    values = read_toml(path)
    if "scale" in values or "of" in values:
        return _of_reproduction(path)
    if "row" in values:
        rows = read_comparison(path, ANY_DEVICE).rows
        return _names(config for row in rows for config in row.configs)
    return _names([resolve(values, what)])


def _of_reproduction(path: Path) -> list[str]:
    cells = read_reproduction(path, settings=ANY_DEVICE).cells
    return _names(config for cell in cells for config in cell.configs)


def _names(configs: Iterable[Config]) -> list[str]:
    return [config.algorithm["name"] for config in configs]
