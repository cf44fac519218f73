"""Saves and loads a federation as a run folder.

The files are those of the command line, and `experiment` reads and writes them. This is the only
module of `federation` that knows of that package, which is built on this one; it is therefore
imported when a federation is saved or loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..data.federated import FederatedData
    from ..modeling.factory import ModelFactory
    from .federation import Federation
    from .resolve import Spec


def save(federation: Federation, folder: str | Path) -> Path:
    """Writes the run folder of a federation; returns its path."""
    from ..experiment.saved_federation import save_federation

    return save_federation(federation, folder)


def load(
    make: type[Federation],
    folder: str | Path,
    model: ModelFactory | Spec | None,
    data: FederatedData | None,
    changes: Mapping[str, Any],
) -> Federation:
    """The federation in a run folder; see `Federation.load`."""
    from ..experiment.loaded_federation import load_federation

    return load_federation(make, folder, model, data, changes)
