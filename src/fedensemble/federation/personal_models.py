"""The models with which single clients predict: each client's own version of each mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..arguments import require_integer
from ..core.types import Plan
from ..errors import InputError
from ..flat_params import select_rows

if TYPE_CHECKING:
    from .federation import Federation


class PersonalModels(NamedTuple):
    """The versions of all K modes that n clients have."""

    theta: Tensor  # [n, K, P]
    buffers: Tensor  # [n, K, R] running statistics


def personal_models(federation: Federation, clients: object) -> PersonalModels:
    """The personal models of some clients; see `Federation.personal_models`."""
    modes = federation.schedule.modes
    chosen = _indices("personal_models()", clients, len(federation.data))
    # One visit of each client to each mode: client state is stored by client and mode.
    plan = Plan(
        torch.tensor(chosen).repeat_interleave(modes), torch.arange(modes).repeat(len(chosen))
    )
    algorithm, state = federation.algorithm, federation.state
    mode, memory = plan.mode.to(federation.model.device), {}
    if not algorithm.joint:  # whose client state belongs to no single mode
        sent = algorithm.broadcast(state.modes)
        fresh = select_rows(algorithm.init_client_state(sent["theta"]), mode)
        memory = federation.engine.read_client_state(plan, fresh)
    theta, buffers = algorithm.personal_model(
        select_rows(state.modes, mode), state.buffers[mode], memory
    )
    shape = (len(chosen), modes, -1)
    return PersonalModels(theta.reshape(shape), buffers.reshape(*shape[:2], buffers.shape[-1]))


def personal_weights(federation: Federation, clients: object) -> Tensor:
    """The weights of the modes in clients' predictions; see `Federation.personal_weights`."""
    modes, algorithm = federation.schedule.modes, federation.algorithm
    chosen = torch.tensor(_indices("personal_weights()", clients, len(federation.data)))
    theta = federation.state.modes["theta"]
    if algorithm.joint:
        plan = Plan(chosen, torch.zeros_like(chosen))
        everyone = theta.reshape(1, -1).expand(len(chosen), -1)
        fresh = algorithm.init_client_state(everyone)
        weights = algorithm.personal_weights(federation.engine.read_client_state(plan, fresh))
        if weights is not None:
            return weights
    return theta.new_full((len(chosen), modes), 1 / modes)


def _indices(owner: str, clients: object, population: int) -> list[int]:
    """The indices of clients as a list; raises unless they are some of N clients."""
    index = clients.tolist() if isinstance(clients, Tensor) else clients
    if not isinstance(index, (list, tuple, range)) or not index:
        raise InputError(
            f"{owner} needs a list of client indices, such as [0, 3]; got {clients!r}."
        )
    chosen = [require_integer(owner, "clients", each, 0) for each in index]
    if max(chosen) >= population:
        raise InputError(
            f"{owner} needs clients below {population}; got {max(chosen)}. "
            "Clients are counted from 0."
        )
    return chosen
