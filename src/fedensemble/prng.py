"""Randomness as a function: the same words give the same numbers on every engine, device, order and
process.

A key is a 64-bit integer made from a seed, a purpose and the words that say what the numbers are
for (round, client, mode, step). Numbers are splitmix64 (Steele, Lea and Flood 2014) at the key:
`mix(key + (i + 1) * GOLDEN)` for position i. There is no state, so nothing has to be saved to
resume. Keys and positions may be tensors of any shape, also under `torch.func.vmap`; int64
arithmetic wraps alike on every device.
"""

from hashlib import blake2b

import torch
from torch import Tensor

Key = int | Tensor

_WORD = 1 << 64
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number: 2^64 / golden ratio
_FIRST, _SECOND = -4658895280553007687, -7723592293110705685  # splitmix64's two multipliers
_FOLD = 0x5851F42D4C957F2D  # sets child keys apart from the numbers drawn at the parent


def key(seed: int, purpose: str, *words: Key) -> Key:
    """The key for a purpose; a tensor if any word is one.

    >>> key(0, "batches", 3, 7) == key(0, "batches", 3, 7), key(0, "batches", 3, 7) == key(0, "batches", 7, 3)
    (True, False)
    """
    name = int.from_bytes(blake2b(purpose.encode(), digest_size=8).digest(), "little")
    return fold(_signed(_mix_int(seed % _WORD) ^ name), *words)


def fold(parent: Key, *words: Key) -> Key:
    """The child key of `parent` for some words, broadcast over tensors."""
    child = parent
    for word in words:
        if isinstance(child, Tensor) or isinstance(word, Tensor):
            place = (word + 1) * _GOLDEN
            base = (
                _mix(child ^ _FOLD)
                if isinstance(child, Tensor)
                else _signed(_mix_int(child ^ _FOLD))
            )
            mixed = base + (place if isinstance(place, Tensor) else _signed(place))
            child = _mix(torch.as_tensor(mixed))
        else:
            child = _signed(_mix_int(_mix_int((child ^ _FOLD) % _WORD) + (word + 1) * _GOLDEN))
    return child


def bits(at: Key, count: int, device: torch.device | str | None = None) -> Tensor:
    """`count` numbers of 63 random bits (never negative) at each key, [..., count]."""
    if isinstance(at, Tensor):
        positions = torch.arange(1, count + 1, device=at.device)
        return _shift(_mix(at.unsqueeze(-1) + positions * _GOLDEN), 1)
    return _shift(_mix(torch.arange(1, count + 1, device=device) * _GOLDEN + at), 1)


def uniform(at: Key, count: int, device: torch.device | str | None = None) -> Tensor:
    """Numbers in (0, 1), float64, [..., count].

    >>> [round(u, 3) for u in uniform(key(0, "doc"), 3).tolist()] == [round(u, 3) for u in
    ...                                                               uniform(key(0, "doc"), 5).tolist()[:3]]
    True
    """
    return (_shift(bits(at, count, device), 10).double() + 0.5) * 2.0**-53


def normal(at: Key, count: int, device: torch.device | str | None = None) -> Tensor:
    """Standard normal numbers, float64, [..., count]."""
    drawn: Tensor = torch.special.ndtri(uniform(at, count, device))
    return drawn


def permutation(at: Key, count: int, sizes: Tensor | None = None) -> Tensor:
    """A random order of 0 .. count-1 at each key, [..., count].

    With `sizes` [...], the first `sizes` entries of a row are a random order of 0 .. size-1, the
    same as `permutation(key, size)` gives; the rest of the row is filler.
    """
    drawn = bits(at, count)
    if sizes is not None:
        outside = torch.arange(count, device=drawn.device) >= sizes.unsqueeze(-1)
        drawn = drawn.masked_fill(outside, (1 << 63) - 1)
    return torch.argsort(drawn, dim=-1, stable=True)


def torch_seed(at: Key) -> int:
    """A key as a seed for torch's own generator, for code that knows no other (weight
    initialisation).
    """
    return int(at) % (1 << 63)


def _shift(z: Tensor, by: int) -> Tensor:
    """Logical right shift: torch's `>>` copies the sign."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * _FIRST
    z = (z ^ _shift(z, 27)) * _SECOND
    return z ^ _shift(z, 31)


def _mix_int(z: int) -> int:
    z %= _WORD
    z = ((z ^ (z >> 30)) * _FIRST) % _WORD
    z = ((z ^ (z >> 27)) * _SECOND) % _WORD
    return z ^ (z >> 31)


def _signed(z: int) -> int:
    z %= _WORD
    return z - _WORD if z >= _WORD // 2 else z
