"""What happens if a block runs out of memory: its size is halved, and its visits train again.

`block_size.py` chooses the size at the start, from an estimate that may be too high.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ...errors import setting
from ...runtime.oom import (
    OOM_ERRORS,
    advise_smaller_visit,
    memory_report,
    oom_error,
    out_of_memory,
)

if TYPE_CHECKING:
    from .local_engine import LocalEngine


def fits_in_memory(
    engine: LocalEngine, train_block: Callable[[], None], visits: int, round: int
) -> bool:
    """Calls `train_block`; if it runs out of memory, halves the block size and returns False.

    Args:
        train_block: trains a block of `visits` visits; a joint visit counts once per mode.
        round: counted from 0.

    Raises:
        InputError: a block of one visit ran out of memory.
    """
    try:
        train_block()
        return True
    except OOM_ERRORS as error:
        if not out_of_memory(error):
            raise
        report = memory_report(error, engine.model.device)
    # Outside the `except` block: inside it, the traceback of the error keeps the tensors of the
    # failed attempt alive.
    engine.halve_block_size(visits, report, round)
    return False


def halve_block_size(engine: LocalEngine, tried: int, report: str, round: int) -> None:
    """Halves an engine's block size from this round on, after a block of `tried` visits ran OOM.

    The change is recorded in `blocks` and in the notes, because sums in another order change the
    last bits of results. Raises InputError if the block size is 1 already.

    Args:
        report: of `memory_report`.
        round: counted from 0.
    """
    if engine.block == 1:
        raise oom_error("One visit does", engine.model.device, report, advise_smaller_visit())
    engine.block = max(1, tried // 2)
    engine.blocks = [*engine.blocks, (round, engine.block)]
    torch.cuda.empty_cache()
    note = (
        f"Out of memory in round {round + 1}{report}: from there on {engine.block} visits are "
        f"trained at once instead of {tried}, which changes the last digits of results. "
        f"To repeat them, set {setting('engine.options.block')}."
    )
    engine.notes = [*engine.notes, note]
