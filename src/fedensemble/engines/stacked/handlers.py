"""Dispatch table of the stacked forward pass: which torch function is run by which handler.

A handler has the signature of the function it replaces, with the active `StackedForward` in front.
A new layer needs one module with handlers, an import of it in `forward.py`, and a test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

HandlerFn = TypeVar("HandlerFn", bound=Callable[..., Any])


class Handler(NamedTuple):
    """What runs in place of a torch function."""

    run: Callable[..., Any]
    layer: bool  # see `handles`
    takes_frozen: bool


HANDLERS: dict[Any, Handler] = {}


def handles(
    *functions: Any, layer: bool = False, takes_frozen: bool = False
) -> Callable[[HandlerFn], HandlerFn]:
    """Decorator: registers a handler for these torch functions.

    Args:
        layer: the first argument must be a batch [J * B, ...]. A call with anything else, such as a
            sequence-first batch [T, J * B, ...] or a parameter, is run by `direct_use.py`. Where
            all parameters of the layer are frozen, torch's own function runs on the large batch.
        takes_frozen: the handler takes frozen parameters as they are, without a stack. Others get
            them expanded to [J, *shape].
    """

    def register(run: HandlerFn) -> HandlerFn:
        HANDLERS.update(dict.fromkeys(functions, Handler(run, layer, takes_frozen)))
        return run

    return register
