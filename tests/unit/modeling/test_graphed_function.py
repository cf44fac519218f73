"""The cache of CUDA graphs: when it captures, replays, evicts and gives up.

A fake capture on the CPU stands for CUDA's, so the tests need no GPU.
"""

import pytest
import torch

from fedensemble.modeling.graphed_function import GraphedFunction


class FakeCapture:
    """Computes through buffers of its own, as a graph does, and counts captures and replays."""

    def __init__(self, error=None):
        self.captured, self.replays, self.error = [], 0, error

    def __call__(self, function, args):
        self.captured.append(tuple(a.shape if isinstance(a, torch.Tensor) else a for a in args))
        if self.error is not None:
            raise self.error
        buffers = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]

        def replay(*args):
            self.replays += 1
            for buffer, value in zip(buffers, args, strict=True):
                if isinstance(buffer, torch.Tensor):
                    buffer.copy_(value)
            return function(*buffers).clone()

        return replay


def scale(by, x):
    return by * x


def test_the_second_call_is_captured_and_later_calls_are_replayed():
    capture = FakeCapture()
    function = GraphedFunction(scale, capture)
    for call, replays in enumerate((0, 1, 2, 3)):
        x = torch.arange(3.0) + call
        assert torch.equal(function(2, x), 2 * x)
        assert (len(capture.captured), capture.replays) == (min(call, 1), replays)


def test_results_are_not_overwritten():
    function = GraphedFunction(scale, FakeCapture())
    results = [function(1, torch.full((2,), float(call))) for call in range(4)]
    assert [float(result[0]) for result in results] == [0, 1, 2, 3]


def test_signatures_differ_by_shape_dtype_and_other_values():
    capture = FakeCapture()
    function = GraphedFunction(scale, capture)
    different = [
        (2, torch.ones(3)),
        (3, torch.ones(3)),
        (2, torch.ones(4)),
        (2, torch.ones(3, dtype=torch.int64)),
    ]
    for args in different:
        function(*args)
    assert not capture.captured
    for by, x in different * 2:
        result = function(by, x)
        assert result.dtype == x.dtype
        assert torch.equal(result, by * x)
    assert len(capture.captured) == 4
    assert capture.replays == 8


def test_the_least_recently_used_signature_is_dropped():
    capture = FakeCapture()
    function = GraphedFunction(scale, capture, cache_size=2)
    one, two, three = (torch.ones(size) for size in (1, 2, 3))
    for x in (one, two, one, two, one, three):  # drops `two`
        function(1, x)
    assert capture.captured == [(1, one.shape), (1, two.shape)]
    assert len(function.cache) == 2
    function(1, one)
    assert len(capture.captured) == 2
    function(1, two)
    function(1, two)
    assert capture.captured[2:] == [(1, two.shape)]


@pytest.mark.parametrize(
    "error", [RuntimeError("not permitted\nwhile capturing"), torch.OutOfMemoryError("full")]
)
def test_a_function_that_cannot_be_captured_always_runs_eagerly(error):
    capture = FakeCapture()
    function = GraphedFunction(scale, capture)
    for _ in range(2):
        function(1, torch.ones(1))
    capture.error = error
    for call in range(4):
        x = torch.arange(2.0) + call
        assert torch.equal(function(5, x), 5 * x)
        function(1, torch.ones(1))
    assert len(capture.captured) == 2
    assert function.failure == str(error).splitlines()[0]
    assert not function.cache


def test_errors_of_the_function_itself_are_raised():
    def wrong(x):
        raise ValueError("wrong")

    function = GraphedFunction(wrong, lambda function, args: function(*args))
    for _ in range(3):
        with pytest.raises(ValueError, match="wrong"):
            function(torch.ones(1))
    assert function.failure is None


def test_without_a_capture_nothing_is_cached():
    function = GraphedFunction(scale)
    for _ in range(3):
        assert torch.equal(function(2, torch.ones(2)), torch.full((2,), 2.0))
    assert not function.cache
