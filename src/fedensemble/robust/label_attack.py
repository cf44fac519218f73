"""Attacks on the data that malicious clients train on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..core.attack import Attack, attacks
from ..errors import InputError


@attacks.register("label-flip")
@dataclass(frozen=True, kw_only=True)
class LabelFlip(Attack):
    """Malicious clients train on wrong labels, C - 1 - y instead of y, and upload the result."""

    forges = False

    def labels(self, y: Tensor, classes: int | None) -> Tensor:
        if classes is None:
            raise InputError(
                "Attack 'label-flip' needs classification: the targets here are not class labels."
            )
        return classes - 1 - y

    def forge(self, own: Tensor, honest: Tensor, key: Tensor) -> Tensor:
        return own
