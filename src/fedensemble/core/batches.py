"""Which examples a client sees in which local step: one definition for every engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .. import prng
from ..errors import InputError

LastBatch = Literal["keep", "wrap", "drop"]
_MOST = 1_000_000  # epochs or steps of a visit


@dataclass(frozen=True)
class LocalWork:
    """How much a client trains in a round.

    Args:
        epochs: passes over the client's examples; used when `steps` is None.
        steps: number of minibatch steps, the same for all clients.
        batch_size: B; at most the size of the largest client is used.
        last_batch: an epoch's last, smaller batch is kept as it is ("keep"), filled up with the
            epoch's first examples ("wrap"), or left out ("drop"; a client with less than one batch
            wraps).
    """

    epochs: int = 1
    steps: int | None = None
    batch_size: int = 32
    last_batch: LastBatch = "keep"

    def __post_init__(self) -> None:
        for name in ("epochs", "steps", "batch_size"):
            value = getattr(self, name)
            if (isinstance(value, bool) or not isinstance(value, int)) and not (
                name == "steps" and value is None
            ):
                raise InputError(f"Local training needs a whole number for {name}; got {value!r}.")
        if self.batch_size < 1:
            raise InputError(f"Local training needs batch_size >= 1; got {self.batch_size}.")
        if self.epochs < 1 or (self.steps is not None and self.steps < 1):
            raise InputError(
                f"Local training needs epochs >= 1 and steps >= 1; got {self.epochs} and {self.steps}."
            )
        # the rows of all steps are drawn before the first one
        if max(self.epochs, self.steps or 1) > _MOST:
            raise InputError(
                f"Local training needs epochs and steps of at most {_MOST:,}; got {self.epochs} and "
                f"{self.steps}."
            )
        if not isinstance(self.last_batch, str) or self.last_batch not in ("keep", "wrap", "drop"):
            raise InputError(f"last_batch is 'keep', 'wrap' or 'drop'; got {self.last_batch!r}.")

    def steps_an_epoch(self, sizes: Tensor) -> Tensor:
        """Minibatches in one pass over clients of these sizes."""
        whole = sizes // self.batch_size
        if self.last_batch == "drop":
            return whole.clamp(min=1)
        return whole + (sizes % self.batch_size > 0)

    def count(self, sizes: Tensor) -> Tensor:
        """Local steps of clients of these sizes."""
        if self.steps is not None:
            return torch.full_like(sizes, self.steps)
        return self.epochs * self.steps_an_epoch(sizes)

    def samples(self, sizes: Tensor) -> Tensor:
        """Examples that clients of these sizes go through in a round, filler not counted."""
        steps, an_epoch = self.count(sizes), self.steps_an_epoch(sizes)
        if self.last_batch != "keep":
            return steps * self.batch_size
        return steps // an_epoch * sizes + steps % an_epoch * self.batch_size


def batch_table(
    keys: Tensor, sizes: Tensor, work: LocalWork, host: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Rows and weights of every local step of J visits.

    Each epoch goes once through a client's examples in an order drawn from the visit's key.

    Args:
        keys: one a visit, [J].
        sizes: examples of the visit's client, [J].
        host: the same sizes on the CPU, where shapes can be read off without waiting for the
            device.

    Returns:
        rows [S, J, B], positions within the client, and weights [S, J, B]: 1 for an example that
        counts, 0 for filler (beyond a smaller last batch, or beyond the visit's last step).
    """
    host = sizes if host is None else host
    epochs = int(
        torch.max((work.count(host) + work.steps_an_epoch(host) - 1) // work.steps_an_epoch(host))
    )
    steps, batch, longest = int(work.count(host).max()), work.batch_size, int(host.max())
    an_epoch, counts = work.steps_an_epoch(sizes), work.count(sizes)
    # [E, J, n]
    orders = torch.stack(
        [prng.permutation(prng.fold(keys, e), longest, sizes) for e in range(epochs)]
    )

    step = torch.arange(steps, device=sizes.device).reshape(-1, 1, 1)
    epoch = (step // an_epoch.reshape(1, -1, 1)).clamp(max=epochs - 1)
    place = (step % an_epoch.reshape(1, -1, 1)) * batch + torch.arange(batch, device=sizes.device)
    size = sizes.reshape(1, -1, 1)
    inside = torch.ones_like(place, dtype=torch.bool) if work.last_batch != "keep" else place < size
    place = place % size
    visit = torch.arange(len(sizes), device=sizes.device).reshape(1, -1, 1).expand_as(place)
    return orders[epoch.expand_as(place), visit, place], inside & (step < counts.reshape(1, -1, 1))
