"""The sizes of a visit's two messages in bytes, as its algorithm counts them."""

from __future__ import annotations

import inspect
from functools import cache

from torch import Tensor

from ...flat_params import Tree
from ..algorithm import Algorithm


@cache
def takes_optional_argument(kind: type[Algorithm], name: str) -> bool:
    """Whether `upload_bytes` or `download_bytes` of an algorithm takes the optional last argument.

    Overrides with two arguments are allowed. Engines read client state for this purpose only if the
    override takes it.

    Args:
        kind: the algorithm's class.
        name: "upload_bytes" or "download_bytes".
    """
    method = getattr(kind, name)
    if method is getattr(Algorithm, name):  # the base class takes the argument but ignores it
        return False
    parameters = list(inspect.signature(method).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    # more than `self` and two arguments
    return len(positional) > 3 or any(p.kind is p.VAR_POSITIONAL for p in parameters)


def bytes_up(algorithm: Algorithm, uploads: Tree, sent: Tree, shared_draw: Tensor) -> int | Tensor:
    """Bytes that one client uploads, an int or int64 [..., 1]; see `Algorithm.upload_bytes`."""
    if takes_optional_argument(type(algorithm), "upload_bytes"):
        return algorithm.upload_bytes(uploads, shared_draw, sent)
    return algorithm.upload_bytes(uploads, shared_draw)


def bytes_down(algorithm: Algorithm, sent: Tree, memory: Tree, shared_draw: Tensor) -> int | Tensor:
    """Bytes that one client downloads, an int or int64 [..., 1]; see `Algorithm.download_bytes`."""
    if takes_optional_argument(type(algorithm), "download_bytes"):
        return algorithm.download_bytes(sent, shared_draw, memory)
    return algorithm.download_bytes(sent, shared_draw)
