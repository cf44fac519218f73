"""Counter-based PRNG: random values are a pure function of a key, on every engine and device.

A key is a 64-bit integer that is derived from a seed, a purpose and integers that say what the
values are for (round, client, mode, step); `core/visits/visit_keys.py` makes the keys of visits.
The value at position i of a key is splitmix64 (Steele, Lea and Flood 2014) at counter i,
`mix(key + (i + 1) * GOLDEN)`. There is no generator state: values do not depend on the order in
which clients train or on the number of processes, and a checkpoint has nothing to save. The names
are those of `jax.random`.

Keys and positions may be tensors of any shape, also inside `torch.func.vmap`. Everything is int64
arithmetic, which wraps around identically on every device. Tensors in the memory of the host are
computed by NumPy: a round draws hundreds of keys for a few visits each, where the cost of an
operation is that of calling it, and NumPy has unsigned integers and takes a third of the time.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .runtime.torch_compat import host_array

Key = int | Tensor
Words = NDArray[np.uint64]

_WORD = 1 << 64
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed integer: 2^64 / golden ratio
_FIRST, _SECOND = -4658895280553007687, -7723592293110705685  # splitmix64's two multipliers
_FOLD = 0x5851F42D4C957F2D  # keeps child keys distinct from the values drawn at the parent
# The same numbers for NumPy, which would turn a Python integer into float64 in some operations.
_GOLDEN64, _FIRST64, _SECOND64, _FOLD64, _1, _30, _27, _31 = (
    np.uint64(number % _WORD) for number in (_GOLDEN, _FIRST, _SECOND, _FOLD, 1, 30, 27, 31)
)


def key(seed: int, purpose: str, *words: Key) -> Key:
    """The key of a purpose and some integers; a tensor if any of them is one.

    The text of the purpose is hashed into the key, so that changing it changes all results.

    >>> key(0, "batches", 3, 7) == key(0, "batches", 3, 7)
    True
    >>> key(0, "batches", 3, 7) == key(0, "batches", 7, 3)
    False
    """
    return fold_in(_signed(_mix_int(seed % _WORD) ^ _hash(purpose)), *words)


@lru_cache(maxsize=256)
def _hash(purpose: str) -> int:
    return int.from_bytes(blake2b(purpose.encode(), digest_size=8).digest(), "little")


def fold_in(parent: Key, *words: Key) -> Key:
    """The child key of `parent` for some integers, broadcast over tensors.

    Python integers and tensors give the same keys.
    """
    on_host = _host_words((parent, *words))
    if on_host is not None:
        return _fold_in_words(on_host)
    child = parent
    for word in words:
        if isinstance(child, Tensor) or isinstance(word, Tensor):
            offset = (word + 1) * _GOLDEN
            base = (
                _mix(child ^ _FOLD)
                if isinstance(child, Tensor)
                else _signed(_mix_int(child ^ _FOLD))
            )
            # torch takes only integers that fit into int64, so Python's are wrapped first.
            mixed = base + (offset if isinstance(offset, Tensor) else _signed(offset))
            child = _mix(torch.as_tensor(mixed))
        else:
            child = _signed(_mix_int(_mix_int((child ^ _FOLD) % _WORD) + (word + 1) * _GOLDEN))
    return child


def bits(key: Key, count: int, device: torch.device | str | None = None) -> Tensor:
    """`count` integers of 63 random bits (never negative) per key, [..., count]."""
    if isinstance(key, Tensor):
        words = host_array(key)
        if words is not None:
            return _bits_of_words(words[..., None], count)
        positions = torch.arange(1, count + 1, device=key.device)
        return _shift(_mix(key.unsqueeze(-1) + positions * _GOLDEN), 1)
    if device is None or torch.device(device).type == "cpu":
        return _bits_of_words(np.uint64(key % _WORD), count)
    return _shift(_mix(torch.arange(1, count + 1, device=device) * _GOLDEN + key), 1)


def uniform(key: Key, count: int, device: torch.device | str | None = None) -> Tensor:
    """`count` uniform values in (0, 1) per key, float64, [..., count].

    The first values do not depend on `count`:

    >>> bool((uniform(key(0, "doc"), 3) == uniform(key(0, "doc"), 5)[:3]).all())
    True
    """
    # 53 bits are what a float64 holds. The half keeps 0 out, where `ndtri` is infinite.
    # `>>` suffices, because the bits are never negative.
    return ((bits(key, count, device) >> 10).double() + 0.5) * 2.0**-53


def normal(key: Key, count: int, device: torch.device | str | None = None) -> Tensor:
    """`count` standard normal values per key, float64, [..., count]."""
    values: Tensor = torch.special.ndtri(uniform(key, count, device))
    return values


def permutation(key: Key, count: int, sizes: Tensor | None = None) -> Tensor:
    """A random permutation of 0 .. count-1 per key, [..., count].

    With `sizes` [...], the first `size` entries of a row are a random permutation of 0 .. size-1,
    the same as `permutation(key, size)` returns; the rest of the row is padding.
    """
    sort_keys = bits(key, count)
    if sizes is not None:
        # Padding sorts last because its sort key is the largest int64.
        is_padding = torch.arange(count, device=sort_keys.device) >= sizes.unsqueeze(-1)
        sort_keys = sort_keys.masked_fill(is_padding, (1 << 63) - 1)
    return torch.argsort(sort_keys, dim=-1, stable=True)


def torch_seed(key: Key) -> int:
    """A seed for torch's own generator, which weight initialization draws from."""
    return int(key) % (1 << 63)


def _host_words(values: tuple[Key, ...]) -> list[int | Words] | None:
    """The values with arrays instead of tensors; None if one is elsewhere, or none is a tensor."""
    words: list[int | Words] = []
    tensors = False
    for value in values:
        if isinstance(value, Tensor):
            array = host_array(value)
            if array is None:
                return None
            words.append(array)
            tensors = True
        else:
            words.append(value)
    return words if tensors else None


def _fold_in_words(values: list[int | Words]) -> Tensor:
    """`fold_in` of values of which one or more are arrays."""
    child, *words = values
    for word in words:
        if isinstance(child, int) and isinstance(word, int):
            child = _signed(_mix_int(_mix_int((child ^ _FOLD) % _WORD) + (word + 1) * _GOLDEN))
            continue
        base: Any = (
            np.uint64(_mix_int(child ^ _FOLD))
            if isinstance(child, int)
            else _mix_words(child ^ _FOLD64)
        )
        offset: Any = (
            np.uint64((word + 1) * _GOLDEN % _WORD)
            if isinstance(word, int)
            else (word + _1) * _GOLDEN64
        )
        child = _mix_words(base + offset)
    return torch.from_numpy(np.asarray(child).view(np.int64))


def _bits_of_words(key: Any, count: int) -> Tensor:
    """`bits` of keys [..., 1] in the memory of the host, or of one key."""
    mixed = _mix_words(np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN64 + key)
    mixed >>= _1
    return torch.from_numpy(mixed.view(np.int64))


def _mix_words(z: Words) -> Words:
    """splitmix64's output function, of an array."""
    z = z ^ (z >> _30)
    z *= _FIRST64
    z ^= z >> _27
    z *= _SECOND64
    z ^= z >> _31
    return z


def _shift(z: Tensor, by: int) -> Tensor:
    """Logical right shift: torch's `>>` copies the sign bit."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def _mix(z: Tensor) -> Tensor:
    """splitmix64's output function, of int64 tensors."""
    z = (z ^ _shift(z, 30)) * _FIRST
    z = (z ^ _shift(z, 27)) * _SECOND
    return z ^ _shift(z, 31)


def _mix_int(z: int) -> int:
    """splitmix64's output function, of a Python integer modulo 2^64."""
    z %= _WORD
    z = ((z ^ (z >> 30)) * _FIRST) % _WORD
    z = ((z ^ (z >> 27)) * _SECOND) % _WORD
    return z ^ (z >> 31)


def _signed(z: int) -> int:
    """The int64 with the same 64 bits."""
    z %= _WORD
    return z - _WORD if z >= _WORD // 2 else z
