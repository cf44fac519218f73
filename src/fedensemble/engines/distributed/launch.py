"""Joins the torchrun job that this process belongs to, and ends all ranks when one ends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType

import torch.distributed as dist

from ...errors import FedEnsembleError, InputError, RankError
from .process_group import TIMEOUT, ProcessGroup, format_error

_FAILED, _BAD_INPUT, _INTERRUPTED = 1, 2, 130  # exit codes


# How a job ends. The user should read one error message, not one per rank, and torchrun sends
# SIGTERM to all ranks as soon as the first has ended. So rank 0 speaks for all:
#
# - If rank 0 fails, it tells the others the reason and raises.
# - If another rank fails, it has sent its error to rank 0 (`ProcessGroup.together`), which raises
#   it. The rank itself waits until rank 0 has ended and exits without a message.
# - If rank 0 is gone and cannot speak, the others raise themselves (`RankError.reported` is False).
# - An error of another class is most likely a bug. The rank on which it occurs raises it, too, so
#   that its traceback is printed.
@contextmanager
def job(timeout: float = TIMEOUT) -> Iterator[ProcessGroup]:
    """The ranks of the job that this process belongs to; without torchrun, this process alone.

    If one rank fails, all ranks end. Rank 0 raises the error, and the others exit without a
    message, unless rank 0 itself is gone.

    Args:
        timeout: seconds after which a rank that does not reply counts as gone. It must be longer
            than the longest round.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ProcessGroup()
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise InputError(
            f"WORLD_SIZE is {size}, but {', '.join(missing)} not set: "
            "start the ranks with torchrun."
        )
    rank = int(os.environ["RANK"])
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        reason = str(error).splitlines()[0]
        raise RankError(
            f"Rank {rank} of {size} cannot join the others at {address}: {reason}", reported=False
        ) from None
    with _raise_on_sigterm() as sigterm_errors:
        ranks = ProcessGroup(rank, size, timeout)
        try:
            yield ranks
        except BaseException as error:
            _ignore_sigterm()
            # The error of the signal may have been raised inside library code that caught it and
            # raised another one.
            if sigterm_errors and not isinstance(error, FedEnsembleError):
                error = sigterm_errors[0]
            if rank == 0:
                ranks.notify_exit(format_error(error))
                raise error from None
            if isinstance(error, RankError) and not error.reported:
                raise
            ranks.wait_for_rank0()
            if isinstance(error, (FedEnsembleError, KeyboardInterrupt)):  # rank 0 reports it
                raise SystemExit(
                    _INTERRUPTED if isinstance(error, KeyboardInterrupt) else _FAILED
                ) from None
            raise
    dist.destroy_process_group()


def refuse_ranks(command: str) -> None:
    """Raises if torchrun has started several processes for a command that runs in one."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if os.environ.get("RANK", "0") != "0":
            raise SystemExit(_BAD_INPUT)
        raise InputError(
            f"'{command}' runs in one process: start it without torchrun. "
            "Runs that are finished cost it nothing."
        )


@contextmanager
def _raise_on_sigterm() -> Iterator[list[RankError]]:
    """Turns SIGTERM, which torchrun sends when another rank has ended, into a RankError.

    Yields a list that contains the error once the signal has arrived.
    """
    errors: list[RankError] = []

    def raise_error(number: int, frame: FrameType | None) -> None:
        _ignore_sigterm()
        errors.append(
            RankError(
                "torchrun ends this rank, most often because another one is gone; the run stops."
            )
        )
        raise errors[0]

    if threading.current_thread() is not threading.main_thread():
        yield errors
        return
    before = signal.signal(signal.SIGTERM, raise_error)
    yield errors
    # Not in a `finally`: after an error SIGTERM stays ignored, so that the message can be printed.
    signal.signal(signal.SIGTERM, before)


def _ignore_sigterm() -> None:
    """Ignores SIGTERM from here on: this process is about to end and prints its error first."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
