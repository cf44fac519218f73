"""Functions as CUDA graphs: captured once per argument signature, then replayed.

Algorithms use it for work on the server (FedBE, PFNM), through `ServerContext`. The clients' local
training is captured in `engines/local/cuda_graph_training.py`.

Launching a small kernel from Python costs more time than the kernel itself. A CUDA graph records
all kernel launches of one call and replays them with a single launch. A graph reads and writes
fixed addresses, so arguments are copied into buffers of the graph's own before a replay, and the
result is copied out afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

Function = Callable[..., Tensor]
# (function, example arguments) -> the same function for arguments of that signature
Capture = Callable[[Function, tuple[Any, ...]], Function]

# Signatures in the cache; each captured one holds a copy of its arguments on the GPU.
_CACHE_SIZE = 8
# Calls before capture, as torch recommends: libraries such as cuBLAS initialize themselves in their
# first call, which must not happen during capture.
_WARM_UP_CALLS = 3


class GraphedFunction:
    """A function that is captured at the second call with a signature, and replayed from then on.

    Two calls have the same signature if their tensors have the same shapes, dtypes and devices, and
    their other arguments are equal. A function that cannot be captured always runs eagerly.

    Args:
        function: takes tensors and hashable values. Whatever else it reads must keep its value and
            its address.
        capture: captures the function; None never does.
        cache_size: signatures to keep; the least recently used one is dropped.
    """

    def __init__(
        self, function: Function, capture: Capture | None = None, cache_size: int = _CACHE_SIZE
    ) -> None:
        self.function, self.capture, self.cache_size = function, capture, cache_size
        self.failure: str | None = None  # why the function is no longer captured
        # By signature, least recently used first. None: seen once, and not captured, because
        # capture costs more than one call.
        self.cache: dict[Any, Function | None] = {}

    def __call__(self, *args: Any) -> Tensor:
        replay = None if self.capture is None else self._find_replay(self.capture, args)
        return self.function(*args) if replay is None else replay(*args)

    def _find_replay(self, capture: Capture, args: tuple[Any, ...]) -> Function | None:
        """The replay of the arguments' signature, captured if need be; None to run eagerly."""
        signature = tuple(
            (a.shape, a.dtype, a.device) if isinstance(a, Tensor) else a for a in args
        )
        seen, replay = signature in self.cache, self.cache.pop(signature, None)
        if seen and replay is None:
            try:
                replay = capture(self.function, args)
            except RuntimeError as error:  # also out of memory: a graph keeps all it allocates
                self.capture, self.failure = None, str(error).partition("\n")[0]
                self.cache.clear()
                return None
        self.cache[signature] = replay
        if len(self.cache) > self.cache_size:
            self.cache.pop(next(iter(self.cache)))
        return replay


class _CaptureState(NamedTuple):
    """What all graphs of a device share: the stream of their capture, and their memory pool.

    The pool belongs to the graphs; it is freed with the last of them.
    """

    stream: torch.cuda.Stream
    graphs: WeakSet[torch.cuda.CUDAGraph]


@cache
def _capture_state(device: torch.device) -> _CaptureState:
    return _CaptureState(torch.cuda.Stream(device), WeakSet())  # type: ignore[no-untyped-call]


def capture_graph(function: Function, args: tuple[Any, ...]) -> Function:
    """The function as a CUDA graph, for arguments of the same signature as `args`."""
    buffers = tuple(a.detach().clone() if isinstance(a, Tensor) else a for a in args)
    device = next(b.device for b in buffers if isinstance(b, Tensor))
    state, current, graph = (
        _capture_state(device),
        torch.cuda.current_stream(device),
        torch.cuda.CUDAGraph(),
    )
    # The outer context restores the current stream: a failed capture would leave its own behind.
    with torch.cuda.stream(current):
        state.stream.wait_stream(current)
        with torch.cuda.stream(state.stream):
            for _ in range(_WARM_UP_CALLS):
                function(*buffers)
        current.wait_stream(state.stream)
        # All graphs share one memory pool. This is safe because a result is copied out of the pool
        # before another graph can run and overwrite it.
        pool = next((other.pool() for other in state.graphs), None)
        try:
            with torch.cuda.graph(graph, pool=pool, stream=state.stream):
                result = function(*buffers)
        except RuntimeError:
            # An aborted capture leaves the pool in an undefined state: later graphs need a new one.
            state.graphs.clear()
            raise
    state.graphs.add(graph)

    def replay(*args: Any) -> Tensor:
        for buffer, value in zip(buffers, args, strict=True):
            if isinstance(buffer, Tensor):
                buffer.copy_(value.detach())
        graph.replay()
        return result.clone()

    return replay
