"""A function of tensors as CUDA graphs: Python runs it a few times for each shape, then the card
repeats it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

Function = Callable[..., Tensor]
# (function, arguments of a kind) -> the same for that kind
Record = Callable[[Function, tuple[Any, ...]], Function]

# kinds of arguments remembered; each that is recorded keeps a copy of its arguments on the card
_MOST = 8
# runs before recording, as torch does: libraries set themselves up, which no graph may record
_WARM_UP = 3


class GraphedFunction:
    """A function that is recorded when arguments of a kind come the second time, and replayed from
    then on.

    Arguments are of one kind if their tensors have the same shapes and types and the others are
    equal. What cannot be recorded runs as it is, for good.

    Args:
        function: of tensors and of values that can be hashed; what else it reads must stay as and
            where it is.
        record: how to record it; None never does.
        most: kinds remembered; the one that has not come for longest is forgotten.
    """

    def __init__(self, function: Function, record: Record | None = None, most: int = _MOST) -> None:
        self.function, self.record, self.most = function, record, most
        self.reason: str | None = None  # why it is no longer recorded
        # None: came once, which is not worth a recording
        self.known: dict[Any, Function | None] = {}

    def __call__(self, *given: Any) -> Tensor:
        replay = None if self.record is None else self._find(self.record, given)
        return self.function(*given) if replay is None else replay(*given)

    def _find(self, record: Record, given: tuple[Any, ...]) -> Function | None:
        kind = tuple((v.shape, v.dtype, v.device) if isinstance(v, Tensor) else v for v in given)
        came, replay = kind in self.known, self.known.pop(kind, None)
        if came and replay is None:
            try:
                replay = record(self.function, given)
            except RuntimeError as error:  # also where memory runs out: a graph keeps what it needs
                self.record, self.reason = None, str(error).partition("\n")[0]
                self.known.clear()
                return None
        self.known[kind] = replay
        if len(self.known) > self.most:
            self.known.pop(next(iter(self.known)))
        return replay


class _Place(NamedTuple):
    """Where a device's graphs are recorded, and those that are in use: one stream and one memory
    pool for all.
    """

    stream: torch.cuda.Stream
    graphs: WeakSet[torch.cuda.CUDAGraph]


@cache
def _place(device: torch.device) -> _Place:
    return _Place(torch.cuda.Stream(device), WeakSet())  # type: ignore[no-untyped-call]


def capture_graph(function: Function, given: tuple[Any, ...]) -> Function:
    """The function for arguments like `given` as a CUDA graph."""
    held = tuple(v.detach().clone() if isinstance(v, Tensor) else v for v in given)
    device = next(v.device for v in held if isinstance(v, Tensor))
    place, current, graph = (
        _place(device),
        torch.cuda.current_stream(device),
        torch.cuda.CUDAGraph(),
    )
    with torch.cuda.stream(current):  # a recording that fails would leave its own stream behind
        place.stream.wait_stream(current)
        with torch.cuda.stream(place.stream):
            for _ in range(_WARM_UP):
                function(*held)
        current.wait_stream(place.stream)
        # A pool lives as long as its graphs; they share it since results are copied before the next
        # one runs.
        pool = next((other.pool() for other in place.graphs), None)
        try:
            with torch.cuda.graph(graph, pool=pool, stream=place.stream):
                result = function(*held)
        except RuntimeError:
            place.graphs.clear()  # of a pool in which recording was cut off nobody should take more
            raise
    place.graphs.add(graph)

    def replay(*given: Any) -> Tensor:
        for mine, value in zip(held, given, strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(value.detach())
        graph.replay()
        return result.clone()

    return replay
