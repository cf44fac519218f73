"""Bytes of a visit's two messages, as its algorithm counts them."""

from __future__ import annotations

import inspect
from functools import cache

from torch import Tensor

from ..flat_params import Tree
from .algorithm import Algorithm


@cache
def sees(kind: type[Algorithm], name: str) -> bool:
    """Whether a method's own `upload_bytes` or `download_bytes` takes its third argument, `sent` or
    `memory`.

    Methods written for two arguments keep working, and engines gather rows of client memory only
    for those that look at them.
    """
    count = getattr(kind, name)
    if count is getattr(Algorithm, name):  # takes it, but makes no use of it
        return False
    parameters = list(inspect.signature(count).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    # `self` is the first of them
    return len(positional) > 3 or any(p.kind is p.VAR_POSITIONAL for p in parameters)


def bytes_up(algorithm: Algorithm, uploads: Tree, sent: Tree, coin: Tensor) -> int | Tensor:
    """Bytes that one client sends: an int, or int64 [..., 1]; arguments as for
    `Algorithm.upload_bytes`.
    """
    if sees(type(algorithm), "upload_bytes"):
        return algorithm.upload_bytes(uploads, coin, sent)
    return algorithm.upload_bytes(uploads, coin)


def bytes_down(algorithm: Algorithm, sent: Tree, memory: Tree, coin: Tensor) -> int | Tensor:
    """Bytes that one client receives: an int, or int64 [..., 1]; arguments as for
    `Algorithm.download_bytes`.
    """
    if sees(type(algorithm), "download_bytes"):
        return algorithm.download_bytes(sent, coin, memory)
    return algorithm.download_bytes(sent, coin)
