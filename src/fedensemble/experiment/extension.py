"""Finds runs that a run with more rounds can continue.

Training never depends on the number of rounds: `Federation` does not know it, and learning rates
decay per round. Only which rounds are tested depends on it, see `RunFolder.drop_test`. Therefore a
run of 60 rounds and 5 more are, to the bit, a run of 65.
"""

from __future__ import annotations

from pathlib import Path

from ..config.schema import Config
from ..errors import FedEnsembleError
from .storage.run_folder import RunFolder


def find_extendable(config: Config, runs: Path) -> list[Path]:
    """Returns checkpoints of the runs in a folder that differ from `config` only in their rounds.

    Args:
        config: of the longer run.
        runs: folder in which each subfolder may be a run.

    Returns:
        paths of checkpoints of earlier rounds than the last, newest first.
    """
    checkpoints: list[Path] = []
    for file in runs.glob("*/config.toml"):
        store = RunFolder(file.parent)
        try:
            if store.differs_from(config)[0] == ["rounds"]:
                checkpoints += store.checkpoints_before(config.rounds)
        except (FedEnsembleError, ValueError, OSError):  # damaged, or in the middle of a deletion
            continue
    return sorted(checkpoints, key=lambda path: path.name, reverse=True)
