"""Dispatch table of the stacked forward pass: which torch function is run by which handler.

A handler has the signature of the function it replaces, with the active `StackedForward` in front.
A new layer needs one module with handlers, an import of it in `forward.py`, and a test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Handler = TypeVar("Handler", bound=Callable[..., Any])

HANDLERS: dict[Any, Callable[..., Any]] = {}


def handles(*functions: Any) -> Callable[[Handler], Handler]:
    """Decorator: registers a handler for these torch functions."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(functions, handler))
        return handler

    return register
