"""Checks before training that the modes fit into memory, and the data into the training dtype."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..core.algorithm import Algorithm
from ..core.average import Average
from ..core.engine import Engine
from ..core.probe import Messages
from ..data import checks
from ..data.federated import FederatedData
from ..errors import InputError, first_line, setting
from ..flat_params import payload_bytes
from ..modeling.factory import RNG_LOCK, ModelFactory, ModelSpec
from ..modeling.functional_model import FunctionalModel
from ..runtime.oom import format_gib, free_bytes

_INITIALIZERS = ("normal_", "uniform_", "trunc_normal_", "zero_", "fill_")


class _SkipInitialization(TorchFunctionMode):
    """Skips functions that initialize parameters.

    Tensors on the device "meta" have no values to initialize. Some of these functions would also
    import torch's compiler, which takes seconds.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(function, "__name__", "") in _INITIALIZERS:
            return args[0] if args else (kwargs or {}).get("tensor")
        return function(*args, **(kwargs or {}))


def check_recipe(model: ModelFactory, modes: int, device: torch.device, dtype: torch.dtype) -> None:
    """Raises if a built-in model with these options is too large; allocates no memory.

    The model is built on the device "meta". Models of other packages are not checked: they may
    cache submodules, and a cached submodule without values would end up in the real model.
    """
    if not isinstance(model, ModelSpec) or not model.built_in:
        return
    try:
        with (
            RNG_LOCK,
            torch.random.fork_rng(devices=[]),
            torch.device("meta"),
            _SkipInitialization(),
        ):
            module = model()
    except (RuntimeError, OverflowError) as error:  # the product of sizes has more than 63 bits
        raise InputError(
            f"The model cannot be made, it is too large: {first_line(error)}."
        ) from None
    except (TypeError, ValueError, AssertionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"The model cannot be made: {first_line(error)}.") from None
    count = sum(tensor.numel() for tensor in (*module.parameters(), *module.buffers()))
    _raise_if_too_large(count, modes, device, dtype)


def check_memory(functional_model: FunctionalModel, modes: int) -> None:
    """Raises if K modes do not fit into free memory; allocates none of them."""
    # Frozen parameters exist once, and already.
    count = functional_model.theta_layout.total + functional_model.buffer_layout.total
    _raise_if_too_large(count, modes, functional_model.device, functional_model.dtype)


def _raise_if_too_large(weights: int, modes: int, device: torch.device, dtype: torch.dtype) -> None:
    """Raises if K modes of `weights` values need more memory than is free on the device."""
    if device.type not in ("cpu", "cuda"):
        return
    # Twice the modes: initialization and every server step hold the old and the new modes.
    needed = 2 * modes * weights * dtype.itemsize
    free = free_bytes(device if device.type == "cuda" else None)
    if needed > free:
        raise InputError(
            f"{modes:,} mode{'s' * (modes > 1)} of {weights:,} weights take {format_gib(needed)} "
            f"with a copy of them, and {format_gib(free)} are free on {device}: "
            f"lower {setting('ensemble.modes')}, or use a smaller model."
        )


class VisitMemory(NamedTuple):
    """What a visit costs, in bytes, and how many visits share a block."""

    parameters: int
    gradients: int
    optimizer: int  # state of the local optimizer, such as momentum
    uploads: int
    client_state: int
    activations: int | None  # of a batch, for the backward pass; None if it was not estimated
    block: int
    frozen: int = 0  # parameters that are not trained: once for all visits and modes

    def __str__(self) -> str:
        """All parts on one line, without those that are empty."""
        parts = {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer state": self.optimizer,
            "uploads": self.uploads,
            "client state": self.client_state,
            "activations": self.activations or 0,
        }
        each = ", ".join(f"{name} {_format(size)}" for name, size in parts.items() if size)
        once = f"; frozen parameters {_format(self.frozen)}, once for all" if self.frozen else ""
        return f"memory of a visit: {each}; {self.block:,} visits per block{once}"


def _format(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"


def visit_memory(
    engine: Engine, algorithm: Algorithm, messages: Messages, frozen: int = 0
) -> VisitMemory:
    """What a visit costs on an engine.

    A block is sized for ten copies of the parameters, because most of the first five exist in an
    old and a new version, and for the activations (see `engines/local/block_size.py`).

    Args:
        messages: of `probe`.
        frozen: bytes of the model's frozen parameters.
    """
    theta, engine = messages.mode["theta"], getattr(engine, "inner", engine)  # of this rank
    slots = algorithm.optimizer.init_state(theta.to("meta"))
    return VisitMemory(
        parameters=theta.nbytes,
        gradients=theta.nbytes,
        optimizer=payload_bytes(slots),
        uploads=payload_bytes(messages.uploads),
        client_state=payload_bytes(messages.memory),
        activations=getattr(engine, "activation_bytes", None),
        block=getattr(engine, "block", 1),
        frozen=frozen,
    )


def check_average_memory(average: Average, theta: Tensor, buffers: Tensor) -> None:
    """Raises if the state of an average does not fit into free memory; allocates none of it.

    Args:
        theta, buffers: of the modes, [K, P] and [K, R].
    """
    device = theta.device
    if device.type not in ("cpu", "cuda"):
        return
    state = average.init(theta.to("meta"), buffers.to("meta"))
    # Twice the state: an update holds the old and the new one.
    needed = 2 * sum(value.numel() * value.element_size() for value in state.values())
    free = free_bytes(device if device.type == "cuda" else None)
    if needed > free:
        raise InputError(
            f"The average {average} of {len(theta):,} modes takes {format_gib(needed)} with a copy "
            f"of its state, and {format_gib(free)} are free on {device}: lower "
            f"{setting('ensemble.modes')}, or let the average keep fewer models."
        )


def check_range(data: FederatedData, dtype: torch.dtype) -> None:
    """Raises if the data has finite values that become infinite in the training dtype."""
    checks.check_range(data.x, "Inputs of the clients' data", dtype)
    checks.check_range(data.y, "Targets of the clients' data", dtype)
    checks.check_range(data.x_test, "Inputs of the test data", dtype)
    checks.check_range(data.y_test, "Targets of the test data", dtype)
    checks.check_range(data.x_server, "The server's inputs", dtype)
