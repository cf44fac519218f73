"""Exit codes: an error that a user can cause prints one message, without a traceback."""

from __future__ import annotations

import os
import sys

import click
import typer

from ..errors import DivergedError, FedEnsembleError, config_keys
from ..text import printable

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


def run_app(app: typer.Typer) -> int:
    """Runs the command in `sys.argv` and returns its exit code."""
    try:
        with config_keys():
            code = app(standalone_mode=False)
        if code == INTERRUPTED:  # typer catches KeyboardInterrupt and returns this code
            raise KeyboardInterrupt
        return code if isinstance(code, int) else DONE
    except click.exceptions.Exit as request:
        return request.exit_code
    except click.ClickException as error:
        error.show()
        return BAD_INPUT
    except (KeyboardInterrupt, click.Abort):
        _print_error("interrupted; run the same command again to continue.")
        return INTERRUPTED
    except DivergedError as error:
        _print_error(f"error: {error}")
        return FAILED
    except FedEnsembleError as error:
        _print_error(f"error: {error}")
        return BAD_INPUT
    except BrokenPipeError:
        # The reader has closed the pipe, as in `fedensemble ls runs | head`. Python flushes stdout
        # when it exits and would print another error; /dev/null takes the rest of the output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except OSError as error:  # one that no module has turned into a StoreError
        path = f"{error.filename}: " if error.filename is not None else ""
        _print_error(f"error: {path}{error.strerror or error}.")
        return BAD_INPUT
    except (MemoryError, RuntimeError) as error:
        return _report_out_of_memory(error)


def _report_out_of_memory(error: MemoryError | RuntimeError) -> int:
    """Prints advice on an out-of-memory error and returns the exit code; raises any other error.

    Places that know what did not fit raise an InputError with better advice; this is the fallback.
    """
    # It imports torch, which commands that only print must not load.
    from ..runtime.oom import out_of_memory

    if not out_of_memory(error):
        raise error
    # torch appends a paragraph on the state of the GPU's memory; the first sentence is enough.
    reason = (str(error).partition(". GPU ")[0].splitlines() or ["out of memory."])[0]
    _print_error(
        f"error: {reason}\nThere is not enough memory: lower ensemble.modes, training.batch_size "
        "or evaluation.batch_size, or use a smaller model or a GPU or host with more memory. "
        "The same command resumes the run from its last checkpoint."
    )
    return FAILED


def _print_error(text: str) -> None:
    print(printable(text, lines=True), file=sys.stderr, flush=True)
