"""How the command line ends: errors a user can cause are one message and an exit code, without a
traceback.
"""

from __future__ import annotations

import os
import sys

import click
import typer

from ..errors import DivergedError, FedEnsembleError
from ..text import printable

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


def guarded(app: typer.Typer) -> int:
    """The exit code of the command line that this process was started with."""
    try:
        code = app(standalone_mode=False)
        if code == INTERRUPTED:  # typer turns an interrupt into this
            raise KeyboardInterrupt
        return code if isinstance(code, int) else DONE
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return BAD_INPUT
    except (KeyboardInterrupt, click.Abort):
        _complain("interrupted; run the same command again to continue.")
        return INTERRUPTED
    except DivergedError as error:
        _complain(f"error: {error}")
        return FAILED
    except FedEnsembleError as error:
        _complain(f"error: {error}")
        return BAD_INPUT
    except BrokenPipeError:  # the reader went away, as in `fedensemble ls runs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except OSError as error:  # a file or folder that nobody expected to fail
        where = f"{error.filename}: " if error.filename is not None else ""
        _complain(f"error: {where}{error.strerror or error}.")
        return BAD_INPUT
    except (MemoryError, RuntimeError) as error:
        return _out_of_memory(error)


def _out_of_memory(error: MemoryError | RuntimeError) -> int:
    """Says that memory ran out where nobody could tell what for; raises any other error."""
    from ..runtime.oom import out_of_memory  # torch, which a command that only prints does not load

    if not out_of_memory(error):
        raise error
    said = str(error).partition(". GPU ")[0].splitlines()[:1] if str(error) else ["out of memory."]
    _complain(
        f"error: {said[0]}\nThere is not enough memory: lower ensemble.modes, training.batch_size or "
        "evaluation.batch_size, or use a smaller model or a larger card or machine. A run goes on after its last "
        "checkpoint."
    )
    return FAILED


def _complain(text: str) -> None:
    print(printable(text, lines=True), file=sys.stderr, flush=True)
