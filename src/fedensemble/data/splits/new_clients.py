"""Holds clients out of training, to measure how the models serve clients that are new."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ...arguments import require_fraction, require_integer
from ...errors import InputError, setting
from ..client_rows import NOBODY, ClientRows
from ..dataset import make_rng
from ..recipe import extend_recipe, with_recipe

if TYPE_CHECKING:
    from ..federated import FederatedData


def hold_out_clients(data: FederatedData, share: float, seed: int) -> FederatedData:
    """Returns the data with a random `share` of the clients, at least one, in `new_clients`.

    The test set stays whole. The rows of the new clients in it have the owner -1, and are also the
    test set of `new_clients`.
    """
    share = require_fraction("data", "new_clients", share)
    require_integer("data", "seed", seed)
    key, clients = setting("data.new_clients"), len(data)
    if not share:
        raise InputError(f"{key} must be above 0; got {share}. Leave it out to train on all.")
    if data.new_clients is not None:
        raise InputError(f"{key}: these data have new clients already.")
    count = max(1, round(share * clients))
    if count >= clients:
        raise InputError(f"{key} = {share:g} of {clients} clients leaves none to train on.")
    order = make_rng(seed, "new-clients").permutation(clients)
    new, known = (torch.from_numpy(np.sort(part)) for part in (order[:count], order[count:]))
    result = replace(
        select_clients(data, known),
        new_clients=_with_own_tests(select_clients(data, new)),
        info={**data.info, "new_clients": share},
    )
    return with_recipe(result, extend_recipe(data.recipe, "new_clients", share, seed))


def select_clients(data: FederatedData, index: Tensor) -> FederatedData:
    """Returns the data of some clients, in this order; the test set stays whole.

    Args:
        index: of the clients, int64 [n].
    """
    size = data.size[index]
    start = size.cumsum(0) - size
    place = torch.arange(int(size.sum())) - start.repeat_interleave(size)
    rows = data.start[index].repeat_interleave(size) + place
    number = torch.full((len(data) + 1,), NOBODY)  # the last entry is that of owner -1
    number[index] = torch.arange(len(index))
    calibration = data.calibration
    if calibration is not None:
        owner = number[calibration.owner]
        kept = owner >= 0
        calibration = ClientRows(calibration.x[kept], calibration.y[kept], owner[kept])
    return replace(
        data,
        x=data.x[rows],
        y=data.y[rows],
        start=start,
        size=size,
        calibration=calibration,
        test_owner=None if data.test_owner is None else number[data.test_owner],
        names=None if data.names is None else tuple(data.names[i] for i in index.tolist()),
        recipe=None,
    )


def _with_own_tests(data: FederatedData) -> FederatedData:
    """Returns the data with the test rows of its own clients only."""
    owner = data.test_owner
    if owner is None or data.x_test is None or data.y_test is None or not bool((owner >= 0).any()):
        return replace(data, x_test=None, y_test=None, test_owner=None)
    own = owner >= 0
    return replace(data, x_test=data.x_test[own], y_test=data.y_test[own], test_owner=owner[own])
