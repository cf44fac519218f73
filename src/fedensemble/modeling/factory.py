"""Builds a user's models: each from its own seed, and no two with a submodule in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from threading import RLock
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from ..errors import InputError, first_line
from ..runtime.torch_compat import apply_to_tensors

ModelFactory = Callable[[], nn.Module]
# Hold it while seeding and drawing from torch's global generator, which all threads share.
RNG_LOCK = RLock()


class ModelSpec:
    """A model's class with its options, plain values as in a config.

    Specs with the same `key` build models of the same structure, so that checks of one hold for the
    other.

    >>> ModelSpec(nn.Linear, {"in_features": 2, "out_features": 3})()
    Linear(in_features=2, out_features=3, bias=True)
    """

    def __init__(self, model: Callable[..., nn.Module], options: Mapping[str, Any]) -> None:
        self.model, self.options = model, dict(options)
        self.key = (model, repr(sorted(self.options.items())))
        # Models of other packages may start from a file that has changed since.
        self.built_in = model.__module__.startswith("fedensemble.")

    def __call__(self) -> nn.Module:
        return self.model(**self.options)


class SeededFactory:
    """Calls a user's factory with a seeded generator, and checks what it returns.

    Submodules that the factory's models share, such as a pretrained backbone, are copied: the
    user's own stay unchanged, and threads that train two models do not write to the same tensors.

    Args:
        factory: a callable that returns a new nn.Module, freshly initialized.
        dtype: of the models' floating-point parameters and buffers.
    """

    def __init__(self, factory: ModelFactory, dtype: torch.dtype) -> None:
        if isinstance(factory, nn.Module) or not callable(factory):
            raise InputError(
                "model must be a callable that returns a new nn.Module, such as the class itself "
                f"or a lambda; got {type(factory).__name__}. Each of the K modes starts from its "
                "own initialization."
            )
        self.factory, self.dtype = factory, dtype
        self._shares_submodules: bool | None = None  # unknown before the first call

    def __call__(self, seed: int) -> nn.Module:
        """A model initialized from a seed, on the CPU so that it is the same for every device."""
        with RNG_LOCK, torch.random.fork_rng(devices=[]):
            _seed_generators(seed)
            model = self._build()
            if self._shares_submodules is None:
                self._shares_submodules = _have_common_submodules(model, self._build())
        if self._shares_submodules:
            model = _copy_model(model)
        # Not `model.to(dtype)`, which would cast complex parameters as well.
        return apply_to_tensors(model, lambda t: t.to(self.dtype) if t.is_floating_point() else t)

    def _build(self) -> nn.Module:
        """Calls the factory; raises unless it returns an initialized nn.Module."""
        try:
            model = self.factory()
        except TypeError as error:  # for example a class that requires arguments
            raise InputError(
                f"model() failed: {first_line(error)}. It is called without arguments."
            ) from error
        if not isinstance(model, nn.Module):
            raise InputError(f"model() must return an nn.Module; got {type(model).__name__}.")
        if any(isinstance(p, UninitializedParameter) for p in model.parameters()):
            raise InputError(
                "Lazy layers have no shape yet; run one batch through the model inside model()."
            )
        return model


def _have_common_submodules(first: nn.Module, second: nn.Module) -> bool:
    """True if two models share a submodule; raises if they are the same object."""
    if first is second:
        raise InputError(
            "model() returned the same nn.Module twice, so all modes would share one "
            "initialization. Build a new module in each call: pass the class itself, or "
            "lambda: Net(...); to start from given weights, lambda: copy.deepcopy(net)."
        )
    return bool({*map(id, first.modules())} & {*map(id, second.modules())})


def _copy_model(model: nn.Module) -> nn.Module:
    """A deep copy of a model that shares submodules with others."""
    try:
        if any(isinstance(part, torch.jit.ScriptModule) for part in model.modules()):
            raise TypeError("copies of scripted modules have no weights of their own.")
        return deepcopy(model)
    except Exception as error:  # a user's module may raise anything
        raise InputError(
            "The models that model() returns share a submodule, which cannot be copied: "
            f"{first_line(error)}. Build all submodules again in each call."
        ) from None


def _seed_generators(seed: int) -> None:
    """Seeds torch's generators on all devices in use.

    Not torch.manual_seed: for a device that is not initialized yet it stores every seed, with a
    traceback, in a list that only grows.
    """
    torch.default_generator.manual_seed(seed)
    for device in (torch.cuda, torch.xpu):  # for models that draw their weights there
        if device.is_initialized():
            device.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)
