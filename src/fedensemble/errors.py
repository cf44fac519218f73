"""The errors a user can meet: each says what was wrong, where, what was got and what to do."""

from collections.abc import Iterable
from difflib import get_close_matches


class FedEnsembleError(Exception):
    """Any error this package raises on purpose; the CLI prints it as one line, without a
    traceback.
    """


class InputError(FedEnsembleError, ValueError):
    """A setting, an argument or an array that cannot be used."""


class DataError(FedEnsembleError, ValueError):
    """A data file that is missing or unreadable, or data that cannot be trained on."""


class DivergedError(FedEnsembleError, ArithmeticError):
    """Training produced a loss or a model that is not finite."""


class StoreError(FedEnsembleError, OSError):
    """A run folder or checkpoint that cannot be read or written."""


class RankError(FedEnsembleError, RuntimeError):
    """A process of the job that failed or is gone.

    Args:
        heard: whether rank 0 knows of it, and so tells the user; otherwise this process does.
    """

    def __init__(self, message: str, heard: bool = True) -> None:
        super().__init__(message)
        self.heard = heard


class AggregatorWarning(UserWarning):
    """A robust aggregator has too few clients to tell who is malicious."""


class EngineWarning(UserWarning):
    """An engine trains a model more slowly, or less precisely, than it could train another."""


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """A sentence that says `name` is no `kind` and names the nearest ones.

    >>> unknown("algorithm", "fedavgg", ["fedavg", "fedprox"])
    "unknown algorithm 'fedavgg': did you mean 'fedavg'? Known: fedavg, fedprox."
    """
    options = sorted(known)
    name = name if len(name) <= 80 else f"{name[:77]}..."
    close = get_close_matches(name, options, n=1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"unknown {kind} '{name}': {hint}Known: {', '.join(options)}."


def first_line(error: Exception) -> str:
    """What an error says, on one line without a full stop.

    >>> first_line(ValueError("bad.")), first_line(KeyError())
    ('bad', 'KeyError')
    """
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
