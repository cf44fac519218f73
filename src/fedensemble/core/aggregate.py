"""Weighted means by mode: the paper's server step, w_k = sum_i d_ik p_i w_i / sum_i d_ik p_i."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..flat_params import Tree
from .types import Cohort, Members


class ModeMeans:
    """Sums uploads mode by mode as blocks of visits come in, and gives the means.

    >>> means = ModeMeans(modes=2)
    >>> means.add(torch.tensor([0, 0]), torch.tensor([1.0, 3.0]), {"theta": torch.tensor([[0.0], [4.0]])})
    >>> means.mean()["theta"].tolist()
    [[3.0], [0.0]]
    """

    def __init__(self, modes: int) -> None:
        self.modes = modes
        self.sums: Tree = {}
        self.count: Tensor | None = None
        self.weight: Tensor | None = None

    def add(self, mode: Tensor, weight: Tensor, uploads: Tree) -> None:
        """Counts in a block of visits: modes [J], weights [J], uploads [J, P].

        All that needs memory comes first: if there is none left, nothing has been counted.
        """
        one = len(mode) == 1
        if one and self.count is None:
            sums = {
                name: value.new_zeros(self.modes, value.shape[-1])
                for name, value in uploads.items()
            }
            self.sums, self.count, self.weight = (
                sums,
                weight.new_zeros(self.modes, 1),
                weight.new_zeros(self.modes, 1),
            )
        place: int | slice = slice(None)
        if one:  # one client at a time: touch one row only
            place, count, total = int(mode[0]), torch.ones_like(weight), weight
            added = {name: weight[0] * value[0] for name, value in uploads.items()}
        else:
            # A product with a K x J matrix, not index_add: its sums come in the same order every
            # time, on a GPU too.
            chosen = (mode == torch.arange(self.modes, device=mode.device).unsqueeze(1)).to(
                weight.dtype
            )
            count, total = chosen.sum(1, keepdim=True), (chosen * weight).sum(1, keepdim=True)
            added = {
                name: (chosen * weight).to(value.dtype) @ value for name, value in uploads.items()
            }
        if self.count is None or self.weight is None:
            self.sums, self.count, self.weight = added, count, total
            return
        self.count[place].add_(count)
        self.weight[place].add_(total)
        for name, value in added.items():
            self.sums[name][place].add_(value)

    def mean(self) -> Tree:
        """Weighted mean of each mode's uploads, [K, P]; zero where there were none."""
        if self.weight is None:
            return {}
        scale = torch.where(self.weight > 0, self.weight, torch.ones_like(self.weight))
        return {name: total / scale.to(total.dtype) for name, total in self.sums.items()}

    def cohort(self, population: int, total: float, coin: Tensor) -> Cohort:
        """Who stands behind the means, among `population` clients whose weights add up to
        `total`.
        """
        empty = torch.zeros(self.modes, 1)
        count, weight = (empty if value is None else value for value in (self.count, self.weight))
        return Cohort(count, weight, weight / total, population, coin)


def gather(parts: Sequence[Members]) -> Members:
    """What blocks of visits sent, as one, in ascending order of (client, mode)."""
    client, mode, weight, buffers = (
        torch.cat([getattr(part, name) for part in parts])
        for name in ("client", "mode", "weight", "buffers")
    )
    order = torch.argsort(client * (int(mode.max()) + 1) + mode)
    uploads = {
        name: torch.cat([part.uploads[name] for part in parts])[order] for name in parts[0].uploads
    }
    return Members(client[order], mode[order], weight[order], uploads, buffers[order])
