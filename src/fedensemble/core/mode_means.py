"""Weighted means per mode, the paper's server step: w_k = sum_i d_ik p_i w_i / sum_i d_ik p_i."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..flat_params import Tree
from .types import Cohort, GatheredUploads


class ModeMeans:
    """Accumulates uploads per mode, block by block, and returns their weighted means.

    >>> means = ModeMeans(modes=2)
    >>> uploads = {"theta": torch.tensor([[0.0], [4.0]])}
    >>> means.add(torch.tensor([0, 0]), torch.tensor([1.0, 3.0]), uploads)
    >>> means.mean()["theta"].tolist()
    [[3.0], [0.0]]
    """

    def __init__(self, modes: int) -> None:
        self.modes = modes
        self.sums: Tree = {}
        self.count: Tensor | None = None
        self.weight: Tensor | None = None

    def add(self, mode: Tensor, weight: Tensor, uploads: Tree) -> None:
        """Adds a block of visits: modes [J], weights [J], uploads [J, P].

        All-or-nothing: all memory is allocated first, so that after an out-of-memory error nothing
        has been added.
        """
        single_visit = len(mode) == 1
        if single_visit and self.count is None:
            sums = {
                name: value.new_zeros(self.modes, value.shape[-1])
                for name, value in uploads.items()
            }
            self.sums, self.count, self.weight = (
                sums,
                weight.new_zeros(self.modes, 1),
                weight.new_zeros(self.modes, 1),
            )
        rows: int | slice = slice(None)
        if single_visit:  # touch one row only, not all K
            rows, count, total = int(mode[0]), torch.ones_like(weight), weight
            added = {name: weight[0] * value[0] for name, value in uploads.items()}
        else:
            # A matmul with a [K, J] matrix, not index_add: on a GPU, index_add sums in a different
            # order every time, and results would differ in their last bits.
            one_hot = (mode == torch.arange(self.modes, device=mode.device).unsqueeze(1)).to(
                weight.dtype
            )
            count, total = one_hot.sum(1, keepdim=True), (one_hot * weight).sum(1, keepdim=True)
            added = {
                name: (one_hot * weight).to(value.dtype) @ value for name, value in uploads.items()
            }
        if self.count is None or self.weight is None:
            self.sums, self.count, self.weight = added, count, total
            return
        self.count[rows].add_(count)
        self.weight[rows].add_(total)
        for name, value in added.items():
            self.sums[name][rows].add_(value)

    def mean(self) -> Tree:
        """The weighted mean of each mode's uploads, [K, P]; zero for a mode without uploads."""
        if self.weight is None:
            return {}
        scale = torch.where(self.weight > 0, self.weight, torch.ones_like(self.weight))
        return {name: total / scale.to(total.dtype) for name, total in self.sums.items()}

    def cohort(self, population: int, total: float, shared_draw: Tensor) -> Cohort:
        """The clients behind the means.

        Args:
            population: N.
            total: sum of the weights of all N clients.
            shared_draw: the round's shared random draw per mode, [K, 1].
        """
        empty = torch.zeros(self.modes, 1)
        count, weight = (empty if value is None else value for value in (self.count, self.weight))
        return Cohort(count, weight, weight / total, population, shared_draw)


def gather(parts: Sequence[GatheredUploads]) -> GatheredUploads:
    """Concatenates the uploads of blocks, in ascending order of (client, mode)."""
    client, mode, weight, buffers = (
        torch.cat([getattr(part, name) for part in parts])
        for name in ("client", "mode", "weight", "buffers")
    )
    order = torch.argsort(client * (int(mode.max()) + 1) + mode)
    uploads = {
        name: torch.cat([part.uploads[name] for part in parts])[order] for name in parts[0].uploads
    }
    return GatheredUploads(client[order], mode[order], weight[order], uploads, buffers[order])
