"""How the command line ends: errors a user can cause are one message and an exit code, without a traceback."""

from __future__ import annotations

import os
import sys

import click
import typer

from ..errors import DivergedError, FedEnsembleError

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
    except MemoryError:
        _complain("error: out of memory. Lower training.batch_size or engine.options.block.")
        return FAILED


def _complain(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
