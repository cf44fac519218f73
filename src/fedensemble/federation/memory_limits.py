"""What does not fit: modes into memory, and data into the floating-point type of training; found
before training.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..data import checks
from ..data.federated import FederatedData
from ..errors import InputError, first_line
from ..modeling.factory import RNG_LOCK, ModelFactory, ModelSpec
from ..modeling.functional_model import FunctionalModel
from ..runtime.oom import format_gib, free_bytes


class _WithoutValues(TorchFunctionMode):
    """Leaves out what initialises weights: without memory there are no values, and torch would load
    its compiler.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(function, "__name__", "") in (
            "normal_",
            "uniform_",
            "trunc_normal_",
            "zero_",
            "fill_",
        ):
            return args[0] if args else (kwargs or {}).get("tensor")
        return function(*args, **(kwargs or {}))


def check_recipe(model: ModelFactory, modes: int, device: torch.device, dtype: torch.dtype) -> None:
    """Raises if a model of ours, with the options of a config, is too large to be made; makes it
    without memory.

    Models of other packages are not tried: they may keep parts of themselves, which would stay
    without values.
    """
    if not isinstance(model, ModelSpec) or not model.model.__module__.startswith("fedensemble."):
        return
    try:
        with RNG_LOCK, torch.random.fork_rng(devices=[]), torch.device("meta"), _WithoutValues():
            made = model()
    except (RuntimeError, OverflowError) as error:  # sizes whose product has more than 63 bits
        raise InputError(
            f"The model cannot be made, it is too large: {first_line(error)}."
        ) from None
    except (TypeError, ValueError, AssertionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"The model cannot be made: {first_line(error)}.") from None
    count = sum(tensor.numel() for tensor in (*made.parameters(), *made.buffers()))
    _refuse_too_many(count, modes, device, dtype)


def check_room(learner: FunctionalModel, modes: int) -> None:
    """Raises if the modes do not fit into memory, before they are made."""
    count = learner.theta_layout.total + learner.buffer_layout.total
    _refuse_too_many(count, modes, learner.device, learner.dtype)


def _refuse_too_many(weights: int, modes: int, device: torch.device, dtype: torch.dtype) -> None:
    if device.type not in ("cpu", "cuda"):
        return
    # Twice: while they are made, and in every round, there are the modes as they were and as they
    # become.
    needed, free = (
        2 * modes * weights * dtype.itemsize,
        free_bytes(device if device.type == "cuda" else None),
    )
    if needed > free:
        raise InputError(
            f"{modes:,} mode{'s' * (modes > 1)} of {weights:,} weights take {format_gib(needed)} with a copy of them, and "
            f"{format_gib(free)} are free on {device}: lower ensemble.modes, or use a smaller model."
        )


def check_range(data: FederatedData, dtype: torch.dtype) -> None:
    """Raises if data hold finite numbers that are infinite in the dtype of training."""
    checks.check_range(data.x, "Inputs of the clients' data", dtype)
    checks.check_range(data.y, "Targets of the clients' data", dtype)
    checks.check_range(data.x_test, "Inputs of the test data", dtype)
    checks.check_range(data.y_test, "Targets of the test data", dtype)
    checks.check_range(data.x_server, "The server's inputs", dtype)
