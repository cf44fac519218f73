"""Minibatches of local training: which examples a client uses in which step, on any engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ... import prng
from ...errors import InputError

LastBatch = Literal["keep", "wrap", "drop"]
MAX_STEPS = 1_000_000  # epochs or steps per visit


@dataclass(frozen=True)
class LocalWork:
    """The amount of local training per round.

    Args:
        epochs: passes over the client's examples; used if `steps` is None.
        steps: number of minibatch steps, the same for all clients.
        batch_size: B; limited to the number of examples of the largest client.
        last_batch: what happens to the last, smaller batch of an epoch: "keep" uses it as it is,
            "wrap" fills it up with the epoch's first examples, and "drop" skips it (but a client
            with less than one batch wraps).
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
                raise InputError(f"Local training needs an integer for {name}; got {value!r}.")
        if self.batch_size < 1:
            raise InputError(f"Local training needs batch_size >= 1; got {self.batch_size}.")
        if self.epochs < 1 or (self.steps is not None and self.steps < 1):
            raise InputError(
                "Local training needs epochs >= 1 and steps >= 1; "
                f"got {self.epochs} and {self.steps}."
            )
        # The rows of all steps are drawn before the first step, so their number must be limited.
        if max(self.epochs, self.steps or 1) > MAX_STEPS:
            raise InputError(
                f"Local training needs epochs and steps of at most {MAX_STEPS:,}; "
                f"got {self.epochs} and {self.steps}."
            )
        if not isinstance(self.last_batch, str) or self.last_batch not in ("keep", "wrap", "drop"):
            raise InputError(f"last_batch is 'keep', 'wrap' or 'drop'; got {self.last_batch!r}.")

    def steps_per_epoch(self, sizes: Tensor) -> Tensor:
        """Minibatches per epoch, for clients of these sizes."""
        full_batches = sizes // self.batch_size
        if self.last_batch == "drop":
            return full_batches.clamp(min=1)
        return full_batches + (sizes % self.batch_size > 0)

    def count(self, sizes: Tensor) -> Tensor:
        """Local steps per visit, for clients of these sizes, unless a plan asks for others."""
        if self.steps is not None:
            return torch.full_like(sizes, self.steps)
        return self.epochs * self.steps_per_epoch(sizes)

    def samples(self, sizes: Tensor, steps: Tensor | None = None) -> Tensor:
        """Examples that clients of these sizes process per visit, without padding.

        Args:
            steps: local steps of each visit; None for those of `count`.
        """
        steps = self.count(sizes) if steps is None else steps
        steps_per_epoch = self.steps_per_epoch(sizes)
        if self.last_batch != "keep":
            return steps * self.batch_size
        return steps // steps_per_epoch * sizes + steps % steps_per_epoch * self.batch_size


def batch_table(
    keys: Tensor,
    sizes: Tensor,
    work: LocalWork,
    cpu_sizes: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rows and weights of every local step of J visits.

    Each epoch passes once over a client's examples, in an order drawn from the visit's key.

    Args:
        keys: PRNG key of each visit, [J].
        sizes: number of examples of each visit's client, [J].
        cpu_sizes: the same sizes on the CPU. Shapes are read from it, which avoids a device sync.
        counts: local steps of each visit, [J], on the CPU; None for those of `work`.

    Returns:
        Rows [S, J, B], which index the client's examples, and weights [S, J, B], which are 1 for
        examples and 0 for padding. Padding fills a smaller last batch, and the steps after a
        visit's last one.
    """
    cpu_sizes = sizes if cpu_sizes is None else cpu_sizes
    num_steps = work.count(cpu_sizes) if counts is None else counts
    per_epoch = work.steps_per_epoch(cpu_sizes)
    epochs = int(torch.max((num_steps + per_epoch - 1) // per_epoch))
    steps, batch, max_size = int(num_steps.max()), work.batch_size, int(cpu_sizes.max())
    steps_per_epoch = work.steps_per_epoch(sizes)
    counts = work.count(sizes) if counts is None else counts.to(sizes.device)
    # [E, J, n]
    orders = torch.stack(
        [prng.permutation(prng.fold_in(keys, e), max_size, sizes) for e in range(epochs)]
    )

    # Position p in the batch of step s is example (s mod steps per epoch) * B + p of the epoch's
    # order.
    step = torch.arange(steps, device=sizes.device).reshape(-1, 1, 1)
    epoch = (step // steps_per_epoch.reshape(1, -1, 1)).clamp(max=epochs - 1)
    index = (step % steps_per_epoch.reshape(1, -1, 1)) * batch + torch.arange(
        batch, device=sizes.device
    )
    size = sizes.reshape(1, -1, 1)
    inside = torch.ones_like(index, dtype=torch.bool) if work.last_batch != "keep" else index < size
    index = index % size
    visit = torch.arange(len(sizes), device=sizes.device).reshape(1, -1, 1).expand_as(index)
    return orders[epoch.expand_as(index), visit, index], inside & (step < counts.reshape(1, -1, 1))
