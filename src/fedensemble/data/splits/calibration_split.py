"""Splits rows for calibration off the training examples of each client."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ... import prng
from ...arguments import require_fraction, require_integer
from ...errors import InputError, setting
from ..client_rows import ClientRows
from ..recipe import extend_recipe, with_recipe

if TYPE_CHECKING:
    from ..federated import FederatedData


def split_calibration(data: FederatedData, share: float, seed: int) -> FederatedData:
    """Returns the data with a random `share` of each client's rows moved to `calibration`.

    A client of n rows gives round(share n), but keeps at least one. Which places among the n rows
    are taken depends only on seed and n. A client of a fleet, which does not know its index,
    therefore splits off the same rows as in a simulation.
    """
    share = require_fraction("data", "calibration", share)
    require_integer("data", "seed", seed)
    key = setting("data.calibration")
    if not share:
        raise InputError(f"{key} must be above 0; got {share}. Leave it out to split off no rows.")
    if data.calibration is not None:
        raise InputError(f"{key}: these data have rows for calibration already.")
    size, count = data.size, (data.size * share).round().long().minimum(data.size - 1)
    owner = torch.repeat_interleave(torch.arange(len(size)), size)
    place = torch.arange(len(owner)) - (size.cumsum(0) - size)[owner]  # of a row in its client
    priority = prng.bits(prng.key(seed, "calibration"), int(size.max()))[place]
    # Sort by priority, then stably by client: within a client, rows are in order of priority.
    by_priority = torch.argsort(priority, stable=True)
    order = by_priority[torch.argsort(owner[by_priority], stable=True)]
    held = torch.zeros(len(owner), dtype=torch.bool)
    held[order] = place < count[owner]  # `owner` and `place` are those of the sorted rows, too
    # Clients may have their rows anywhere in x.
    rows = data.start.repeat_interleave(size) + place
    taken, kept = rows[held], rows[~held]
    without = int((count == 0).sum())
    note = (
        f"{without} of {len(size)} clients have too few rows for {key} = {share:g} and keep all of "
        "them for training; no row of theirs is used for calibration."
    )
    result = replace(
        data,
        x=data.x[kept],
        y=data.y[kept],
        start=(size - count).cumsum(0) - (size - count),
        size=size - count,
        calibration=ClientRows(data.x[taken], data.y[taken], owner[held]),
        info={**data.info, "calibration": share},
        notes=(*data.notes, *((note,) if without else ())),
    )
    if data.new_clients is not None:
        new = split_calibration(data.new_clients, share, seed)
        result = replace(result, new_clients=new)
    return with_recipe(result, extend_recipe(data.recipe, "calibration", share, seed))
