"""Models made by a user's function: each from a seed, and none with a part of another."""

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
RNG_LOCK = RLock()  # who holds it has torch's generator, one for all threads, to themselves


class ModelSpec:
    """A model with its options, plain values as in a config: recipes of one key make models of one
    structure.

    >>> ModelSpec(nn.Linear, {"in_features": 2, "out_features": 3})()
    Linear(in_features=2, out_features=3, bias=True)
    """

    def __init__(self, model: Callable[..., nn.Module], options: Mapping[str, Any]) -> None:
        self.model, self.options = model, dict(options)
        self.key = (model, repr(sorted(self.options.items())))

    def __call__(self) -> nn.Module:
        return self.model(**self.options)


class SeededFactory:
    """Calls a factory, and looks at what it returns.

    Parts that the models have in common, such as a network that was trained before, are copied:
    they stay as they are, and no two models write into them at the same time.

    Args:
        factory: a callable that returns a new nn.Module, freshly initialised.
        dtype: of the models' floating-point numbers.
    """

    def __init__(self, factory: ModelFactory, dtype: torch.dtype) -> None:
        if isinstance(factory, nn.Module) or not callable(factory):
            raise InputError(
                f"model must be a callable that returns a new nn.Module, such as the class itself or a lambda; "
                f"got {type(factory).__name__}. Each of the K modes starts from its own initialisation."
            )
        self.factory, self.dtype = factory, dtype
        self._share: bool | None = None  # whether models have parts in common

    def __call__(self, seed: int) -> nn.Module:
        """A model initialised from a seed, on the CPU so that every device starts alike."""
        with RNG_LOCK, torch.random.fork_rng(devices=[]):
            _seed(seed)
            model = self._checked()
            if self._share is None:
                self._share = _share(model, self._checked())
        if self._share:
            model = _copied(model)
        # Not `model.to(dtype)`, which would cast complex parameters as well.
        return apply_to_tensors(model, lambda t: t.to(self.dtype) if t.is_floating_point() else t)

    def _checked(self) -> nn.Module:
        try:
            model = self.factory()
        except TypeError as error:  # such as a class whose arguments are missing
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


def _share(one: nn.Module, other: nn.Module) -> bool:
    """Whether two models have parts in common; raises if they are one."""
    if one is other:
        raise InputError(
            "model() returned the same nn.Module twice, so all modes would share one start. Make it anew in each call: "
            "the class itself, or lambda: Net(...); for a given start, lambda: copy.deepcopy(net)."
        )
    return bool({*map(id, one.modules())} & {*map(id, other.modules())})


def _copied(model: nn.Module) -> nn.Module:
    """A copy of a model that shares parts with others."""
    try:
        if any(isinstance(part, torch.jit.ScriptModule) for part in model.modules()):
            raise TypeError("copies of scripted modules have no weights of their own.")
        return deepcopy(model)
    except Exception as error:  # whatever a module raises
        raise InputError(
            f"model() returns modules that share a part, and cannot be copied: {first_line(error)} Make all of it anew "
            "in each call."
        ) from None


def _seed(seed: int) -> None:
    """As torch.manual_seed, which also puts every seed on a list, with a traceback, for devices not
    in use yet.
    """
    torch.default_generator.manual_seed(seed)
    for device in (torch.cuda, torch.xpu):  # for models that draw their weights there
        if device.is_initialized():
            device.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)
