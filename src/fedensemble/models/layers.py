"""Functions that several image models use: checks of options, norm layers and initialization."""

from collections.abc import Sequence
from typing import Literal

from torch import nn

from ..errors import InputError

Norm = Literal["batch", "group"]


def check_images(model: str, shape: Sequence[int], **positive: float) -> None:
    """Raises InputError unless `shape` is that of an image and the options are above zero."""
    if len(shape) != 3:
        raise InputError(
            f"Model '{model}' needs images of shape (channels, height, width); got {tuple(shape)}."
        )
    for name, value in positive.items():
        if value <= 0:
            raise InputError(f"Model '{model}' needs {name} > 0; got {value}.")


def norm_layer(norm: Norm, channels: int, groups: int) -> nn.Module:
    """A BatchNorm layer, or a GroupNorm layer with `groups` groups, for `channels` channels."""
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    if norm != "group":
        raise InputError(f"norm is 'batch' or 'group'; got {norm!r}.")
    if groups < 1 or channels % groups:
        raise InputError(
            f"GroupNorm cannot divide {channels} channels into groups={groups}; "
            "choose another number."
        )
    return nn.GroupNorm(groups, channels)


def init_convolutions(model: nn.Module) -> None:
    """Initializes all convolutions with N(0, 2 / fan-out), as torchvision does (He et al. 2015)."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
