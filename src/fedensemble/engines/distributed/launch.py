"""How a process joins the job that torchrun started, and how all of them end when one does."""

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
from .process_group import TIMEOUT, ProcessGroup, describe

_FAILED, _BAD_INPUT, _INTERRUPTED = 1, 2, 130  # exit codes


@contextmanager
def job(timeout: float = TIMEOUT) -> Iterator[ProcessGroup]:
    """The ranks of the job that this process is part of; without torchrun, this process alone.

    If one rank fails, all end: rank 0 with the error, the others in silence, unless rank 0 itself
    is gone.

    Args:
        timeout: seconds after which a rank that says nothing counts as gone; more than the longest
            round.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ProcessGroup()
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise InputError(
            f"WORLD_SIZE is {size}, but {', '.join(missing)} not set: start the ranks with torchrun."
        )
    rank = int(os.environ["RANK"])
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        reason = str(error).splitlines()[0]
        raise RankError(
            f"Rank {rank} of {size} cannot join the others at {where}: {reason}", heard=False
        ) from None
    with _ended_by_signal() as ended:
        ranks = ProcessGroup(rank, size, timeout)
        try:
            yield ranks
        except BaseException as error:
            _ignore_signal()
            # raised inside somebody's `except`
            if ended and not isinstance(error, FedEnsembleError):
                error = ended[0]
            if rank == 0:
                ranks.notify_exit(describe(error))
                raise error from None
            if isinstance(error, RankError) and not error.heard:
                raise
            ranks.wait_for_rank0()
            if isinstance(error, (FedEnsembleError, KeyboardInterrupt)):  # rank 0 says it
                raise SystemExit(
                    _INTERRUPTED if isinstance(error, KeyboardInterrupt) else _FAILED
                ) from None
            raise
    dist.destroy_process_group()


def refuse_ranks(command: str) -> None:
    """Raises where torchrun started several processes for what one does alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if os.environ.get("RANK", "0") != "0":
            raise SystemExit(_BAD_INPUT)
        raise InputError(
            f"'{command}' runs in one process: start it without torchrun. Runs that are finished cost it nothing."
        )


@contextmanager
def _ended_by_signal() -> Iterator[list[RankError]]:
    """Within it, SIGTERM is an error with a message; torchrun sends it when another rank has
    ended.
    """
    ended: list[RankError] = []

    def end(number: int, frame: FrameType | None) -> None:
        _ignore_signal()
        ended.append(
            RankError(
                "torchrun ends this rank, most often because another one is gone; the run stops."
            )
        )
        raise ended[0]

    if threading.current_thread() is not threading.main_thread():
        yield ended
        return
    before = signal.signal(signal.SIGTERM, end)
    yield ended
    signal.signal(signal.SIGTERM, before)  # not after an error: its message must come out first


def _ignore_signal() -> None:
    """No SIGTERM from here on: this process ends by itself, and has something to say first."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
