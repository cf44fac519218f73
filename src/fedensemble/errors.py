"""Errors and warnings for users: each message says what is wrong, where, and what to do."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches


class FedEnsembleError(Exception):
    """Base class of the errors that this package raises on purpose.

    The command line prints them on one line, without a traceback.
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
    """A process of a distributed job that failed or exited.

    Args:
        reported: True if rank 0 knows of the failure and reports it to the user; if False, this
            process has to.
    """

    def __init__(self, message: str, reported: bool = True) -> None:
        super().__init__(message)
        self.reported = reported


class AggregatorWarning(UserWarning):
    """A robust aggregator has too few clients to detect the malicious ones."""


class EngineWarning(UserWarning):
    """An engine has to train this model more slowly, or less precisely, than others."""


class UntrainedWarning(UserWarning):
    """Rounds that were asked for and never trained, or a prediction of untrained modes."""


_names_config_keys = False  # set by `config_keys`


@contextmanager
def config_keys() -> Iterator[None]:
    """Lets messages made inside it name settings by their keys in a config.

    The command line and the code that reads a config use it. It is a plain variable, not one per
    thread, because the threads of an engine make messages, too.
    """
    global _names_config_keys  # noqa: PLW0603
    before, _names_config_keys = _names_config_keys, True
    try:
        yield
    finally:
        _names_config_keys = before


def setting(key: str) -> str:
    """The name of a setting for a message: a Python argument, or its key where a config is used.

    Args:
        key: of the setting in a config.

    >>> setting("ensemble.clients_per_round"), setting("engine.options.block"), setting("attack")
    ('clients_per_round', "engine_options['block']", 'attack')
    >>> with config_keys():
    ...     setting("ensemble.clients_per_round")
    'ensemble.clients_per_round'
    """
    if _names_config_keys:
        return key
    if key.startswith("engine.options."):
        return f"engine_options['{key.removeprefix('engine.options.')}']"
    return key.partition(".")[2] or key


def unknown(kind: str, name: str, known: Iterable[str], hints: Sequence[str] = ()) -> str:
    """The message for an unknown `name` of a `kind`, with the closest known name as a hint.

    A long name is shortened.

    Args:
        hints: what else the name may mean, as it is to be printed; replaces the closest name.

    >>> unknown("algorithm", "fedavgg", ["fedavg", "fedprox"])
    "unknown algorithm 'fedavgg': did you mean 'fedavg'? Known: fedavg, fedprox."
    """
    options = sorted(known)
    name = name if len(name) <= 80 else f"{name[:77]}..."
    guesses = list(hints) or [f"'{close}'" for close in get_close_matches(name, options, n=1)]
    *first, last = guesses or [""]
    hint = f"did you mean {', '.join(first)}{' or ' * bool(first)}{last}? " if guesses else ""
    return f"unknown {kind} '{name}': {hint}Known: {', '.join(options)}."


def first_line(error: Exception) -> str:
    """The first line of an error's message, without a full stop.

    >>> first_line(ValueError("bad.")), first_line(KeyError())
    ('bad', 'KeyError')
    """
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
