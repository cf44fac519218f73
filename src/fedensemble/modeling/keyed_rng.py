"""Random layers that draw by key: dropout gives the same mask on every engine, device and order of
clients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from .. import prng
from ..errors import InputError
from .recurrent import RECURRENT

# Functions that draw from torch's global generator in a way we cannot key; silence here would cost
# repeatability.
_REFUSED = {
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
    """While active, random functions of torch draw from a key instead of the global generator.

    The n-th random call of a forward pass uses the n-th child of the key. Under `vmap` the key
    differs by visit.

    >>> with KeyedRandomness(draws.key(0, "doc")): a = F.dropout(torch.ones(8), 0.5)
    >>> with KeyedRandomness(draws.key(0, "doc")): b = F.dropout(torch.ones(8), 0.5)
    >>> bool((a == b).all())
    True
    """

    def __init__(self, key: prng.Key) -> None:
        super().__init__()
        self.key = key
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _HANDLED:
            return _HANDLED[func](self, *args, **kwargs)
        if func in RECURRENT:
            return RECURRENT[func](self.dropout, *args, **kwargs)
        if getattr(func, "__name__", "") in _REFUSED and kwargs.get("training", True):
            raise InputError(
                f"The model draws random numbers with torch's {func.__name__}, which cannot be repeated on every "
                "engine. Use dropout, torch.rand_like, torch.randn_like or torch.bernoulli."
            )
        return func(*args, **kwargs)

    def next_key(self) -> prng.Key:
        """The key of the next random call of the forward pass."""
        self.calls += 1
        return prng.fold(self.key, self.calls)

    def uniform(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """The next uniform numbers, float64."""
        return prng.uniform(self.next_key(), torch.Size(shape).numel(), device).reshape(
            tuple(shape)
        )

    def normal(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """The next normal numbers, float64."""
        drawn: Tensor = torch.special.ndtri(self.uniform(shape, device))
        return drawn

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
        """As F.dropout1d, 2d and 3d: whole channels [B, C] are dropped."""
        return self._drop(x, (*x.shape[:2], *(1,) * (x.dim() - 2)), p, training)

    def _drop(self, x: Tensor, shape: Sequence[int], p: float, training: bool) -> Tensor:
        if not training or p == 0:
            return x
        if p == 1:
            return x * 0
        drawn = prng.bits(self.next_key(), torch.Size(shape).numel(), x.device).reshape(
            tuple(shape)
        )
        return x * (drawn >= int(p * 2**63)).to(x.dtype) / (1 - p)

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
        wanted = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return self.uniform(wanted, device).to(dtype or torch.get_default_dtype())

    def randn(
        self, *shape: Any, dtype: torch.dtype | None = None, device: Any = None, **_: Any
    ) -> Tensor:
        """As torch.randn."""
        wanted = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return self.normal(wanted, device).to(dtype or torch.get_default_dtype())

    def bernoulli(self, x: Tensor, p: float | None = None, **_: Any) -> Tensor:
        """As torch.bernoulli."""
        return (self.uniform(x.shape, x.device) < (x if p is None else p)).to(x.dtype)

    def attention(self, *args: Any, **kwargs: Any) -> Any:
        """Attention passes through; dropout inside it is refused, for it cannot be keyed."""
        if kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0) > 0:
            raise InputError(
                "Dropout inside attention cannot be repeated on every engine; set its dropout to 0."
            )
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels know no `vmap`
            return F.scaled_dot_product_attention(*args, **kwargs)

    def multi_head(self, *args: Any, **kwargs: Any) -> Any:
        """As `attention`, for nn.MultiheadAttention, whose dropout is the eleventh argument."""
        p = kwargs.get("dropout_p", args[10] if len(args) > 10 else 0.0)
        if p > 0 and kwargs.get("training", True):
            raise InputError(
                "Dropout inside nn.MultiheadAttention cannot be repeated on every engine; set it to 0."
            )
        with sdpa_kernel(SDPBackend.MATH):
            return F.multi_head_attention_forward(*args, **kwargs)


_HANDLED: dict[Any, Callable[..., Any]] = {
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
    # recurrent layers look whether weights lie side by side; ours never do
    Tensor.data_ptr: lambda mode, x: 0,
    Tensor.bernoulli: KeyedRandomness.bernoulli,
    F.scaled_dot_product_attention: KeyedRandomness.attention,
    F.multi_head_attention_forward: KeyedRandomness.multi_head,
}
