"""The registry of models by name."""

from collections.abc import Callable

from torch import nn

from ..registry import Registry

models: Registry[Callable[..., nn.Module]] = Registry("model")
