"""Keyed random layers: dropout masks are a function of a PRNG key, not of torch's global generator.

A client's dropout masks must not depend on the engine, the device or the order in which clients
train, or a run could not be repeated. A TorchFunctionMode therefore intercepts torch's random
functions during a forward pass and draws from `fedensemble.prng` instead. Functions that it cannot
replace raise an error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .. import prng
from ..errors import InputError
from .attention import multi_head_attention, scaled_dot_product_attention
from .recurrent import RECURRENT

# Names of functions that draw from torch's global generator and have no keyed replacement. They
# raise, because a model that uses them would train, but not reproducibly.
_UNSUPPORTED = {
    "alpha_dropout",
    "feature_alpha_dropout",
    "rrelu",
    "gumbel_softmax",
    "multinomial",
    "poisson",
    "normal",
    "randint",
    "randperm",
    "randint_like",
    "normal_",
    "uniform_",
    "bernoulli_",
    "exponential_",
    "random_",
    "geometric_",
    "log_normal_",
    "cauchy_",
    "fractional_max_pool2d",
    "fractional_max_pool3d",
}


class KeyedRandomness(TorchFunctionMode):
    """While active, torch's random functions draw from a key instead of the global generator.

    The n-th random call of a forward pass uses the n-th child of the key. Inside `vmap` every visit
    has its own key.

    >>> masks = []
    >>> for _ in range(2):
    ...     with KeyedRandomness(prng.key(0, "doc")):
    ...         masks.append(F.dropout(torch.ones(8), 0.5))
    >>> torch.equal(*masks)
    True
    """

    def __init__(self, key: prng.Key) -> None:
        super().__init__()
        self.key = key
        self.calls = 0
        self.recomputing = False  # while a checkpointed part runs again, in the backward pass

    def __enter__(self) -> KeyedRandomness:
        _active().append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        _active().pop()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def checkpoint_contexts(
        self,
    ) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """The contexts of a checkpointed part: of its forward pass, and of its second one."""
        start: list[Any] = []
        return self._note_start(start), self._recompute(start)

    @contextmanager
    def _note_start(self, start: list[Any]) -> Iterator[None]:
        """Appends what `go_to` needs to `start`.

        This happens here and not in `checkpoint_contexts`, because torch reads properties of the
        inputs in between, which count as calls of functions.
        """
        start.append(self.position())
        yield

    @contextmanager
    def _recompute(self, start: list[Any]) -> Iterator[None]:
        """Draws the numbers again that were drawn from `start` on.

        The backward pass runs in a thread of its own on a GPU, where this mode is not active.
        """
        before, end = self.recomputing, self.position()
        self.recomputing = True
        self.go_to(start[0])
        try:
            with self:
                yield
        finally:
            self.go_to(end)
            self.recomputing = before  # True within another part

    def position(self) -> Any:
        """How far the pass is."""
        return self.calls

    def go_to(self, position: Any) -> None:
        """Goes back to an earlier position of the pass, or forward again."""
        self.calls = position

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.recomputing and func in (F.batch_norm, F.instance_norm):
            # The running statistics were updated in the forward pass.
            x, *statistics = args[:3]
            args = (x, *(s if s is None else s.clone() for s in statistics), *args[3:])
        if func in REPLACEMENTS:
            return REPLACEMENTS[func](self, *args, **kwargs)
        if func in RECURRENT:
            return RECURRENT[func](self.dropout, *args, **kwargs)
        if getattr(func, "__name__", "") in _UNSUPPORTED and kwargs.get("training", True):
            raise InputError(
                f"The model draws random values with torch's {func.__name__}, which is not "
                "reproducible across engines. Use dropout, torch.rand_like, torch.randn_like or "
                "torch.bernoulli."
            )
        return func(*args, **kwargs)

    def next_key(self) -> prng.Key:
        """The key of the next random call of the forward pass."""
        self.calls += 1
        return prng.fold_in(self.key, self.calls)

    def uniform(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Uniform values in (0, 1) of the next key, float64."""
        values = prng.uniform(self.next_key(), torch.Size(shape).numel(), device)
        return values.reshape(tuple(shape))

    def normal(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Standard normal values of the next key, float64."""
        values: Tensor = torch.special.ndtri(self.uniform(shape, device))
        return values

    def dropout(
        self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        """As F.dropout."""
        if not 0 <= p <= 1:
            raise InputError(f"Dropout probability must be between 0 and 1; got {p}.")
        return self._drop(x, x.shape, p, training)

    def channel_dropout(
        self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        """As F.dropout1d, F.dropout2d and F.dropout3d, which drop entire channels [B, C]."""
        return self._drop(x, (*x.shape[:2], *(1,) * (x.dim() - 2)), p, training)

    def _drop(self, x: Tensor, shape: Sequence[int], p: float, training: bool) -> Tensor:
        """Drops entries of `x` by a mask of `shape`, which broadcasts against it."""
        if not training or p == 0:
            return x
        if p == 1:
            return x * 0
        # Compares integers: a draw of 63 bits is below p * 2^63 with probability p, and int64
        # comparisons have the same result on every device.
        draws = prng.bits(self.next_key(), torch.Size(shape).numel(), x.device)
        mask = draws.reshape(tuple(shape)) >= int(p * 2**63)
        return x * mask.to(x.dtype) / (1 - p)

    def rand_like(self, x: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        """As torch.rand_like."""
        return self.uniform(x.shape, x.device).to(dtype or x.dtype)

    def randn_like(self, x: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        """As torch.randn_like."""
        return self.normal(x.shape, x.device).to(dtype or x.dtype)

    def rand(
        self, *shape: Any, dtype: torch.dtype | None = None, device: Any = None, **_: Any
    ) -> Tensor:
        """As torch.rand."""
        return self.uniform(_as_shape(shape), device).to(dtype or torch.get_default_dtype())

    def randn(
        self, *shape: Any, dtype: torch.dtype | None = None, device: Any = None, **_: Any
    ) -> Tensor:
        """As torch.randn."""
        return self.normal(_as_shape(shape), device).to(dtype or torch.get_default_dtype())

    def bernoulli(self, x: Tensor, p: float | None = None, **_: Any) -> Tensor:
        """As torch.bernoulli."""
        return (self.uniform(x.shape, x.device) < (x if p is None else p)).to(x.dtype)

    def attention(self, *args: Any, **kwargs: Any) -> Tensor:
        """As F.scaled_dot_product_attention."""
        return scaled_dot_product_attention(self.dropout, *args, **kwargs)

    def multi_head_attention(self, *args: Any, **kwargs: Any) -> Any:
        """As F.multi_head_attention_forward, which nn.MultiheadAttention calls."""
        repeat = lambda bias, batch: bias.expand(batch, -1, -1)  # noqa: E731
        return multi_head_attention(self.dropout, F.linear, repeat, *args, **kwargs)


_THREAD = threading.local()


def _active() -> list[KeyedRandomness]:
    """The modes that are active in this thread, the innermost last."""
    if not hasattr(_THREAD, "modes"):
        _THREAD.modes = []
    modes: list[KeyedRandomness] = _THREAD.modes
    return modes


def active_randomness() -> KeyedRandomness | None:
    """The mode that is active in this thread, or None."""
    return _active()[-1] if _active() else None


def _as_shape(size: tuple[Any, ...]) -> Sequence[int]:
    """The shape that torch.rand(2, 3) and torch.rand((2, 3)) mean."""
    return tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size


REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    F.dropout: KeyedRandomness.dropout,
    torch.dropout: lambda mode, x, p, train: mode.dropout(x, p, train),
    F.dropout1d: KeyedRandomness.channel_dropout,
    F.dropout2d: KeyedRandomness.channel_dropout,
    F.dropout3d: KeyedRandomness.channel_dropout,
    torch.feature_dropout: lambda mode, x, p, train: mode.channel_dropout(x, p, train),
    torch.rand_like: KeyedRandomness.rand_like,
    torch.randn_like: KeyedRandomness.randn_like,
    torch.rand: KeyedRandomness.rand,
    torch.randn: KeyedRandomness.randn,
    torch.bernoulli: KeyedRandomness.bernoulli,
    # nn.LSTM & co. compare the addresses of their weights to see if cuDNN could use them as one
    # block of memory. Swapped-in weights have no address inside `vmap`, so all addresses are 0.
    Tensor.data_ptr: lambda mode, x: 0,
    Tensor.bernoulli: KeyedRandomness.bernoulli,
    F.scaled_dot_product_attention: KeyedRandomness.attention,
    F.multi_head_attention_forward: KeyedRandomness.multi_head_attention,
}
