"""When a function is recorded, what counts as the same arguments, what is forgotten; a recorder on
the CPU shows it.
"""

import pytest
import torch

from fedensemble.modeling.cuda_graphs import GraphedFunction


class Recorder:
    """Computes through buffers of its own, as a graph does, and counts."""

    def __init__(self, error=None):
        self.recorded, self.replays, self.error = [], 0, error

    def __call__(self, function, given):
        self.recorded.append(tuple(v.shape if isinstance(v, torch.Tensor) else v for v in given))
        if self.error is not None:
            raise self.error
        held = [v.clone() if isinstance(v, torch.Tensor) else v for v in given]

        def replay(*given):
            self.replays += 1
            for mine, value in zip(held, given, strict=True):
                if isinstance(mine, torch.Tensor):
                    mine.copy_(value)
            return function(*held).clone()

        return replay


def scaled(by, x):
    return by * x


def test_the_second_call_is_recorded_and_later_ones_are_replayed():
    recorder = Recorder()
    function = GraphedFunction(scaled, recorder)
    for call, replays in enumerate((0, 1, 2, 3)):
        x = torch.arange(3.0) + call
        assert torch.equal(function(2, x), 2 * x)
        assert (len(recorder.recorded), recorder.replays) == (min(call, 1), replays)


def test_results_are_not_overwritten():
    function = GraphedFunction(scaled, Recorder())
    results = [function(1, torch.full((2,), float(call))) for call in range(4)]
    assert [float(result[0]) for result in results] == [0, 1, 2, 3]


def test_shapes_types_and_other_values_are_told_apart():
    recorder = Recorder()
    function = GraphedFunction(scaled, recorder)
    different = [
        (2, torch.ones(3)),
        (3, torch.ones(3)),
        (2, torch.ones(4)),
        (2, torch.ones(3, dtype=torch.int64)),
    ]
    for given in different:
        function(*given)
    assert not recorder.recorded
    for by, x in different * 2:
        said = function(by, x)
        assert said.dtype == x.dtype
        assert torch.equal(said, by * x)
    assert len(recorder.recorded) == 4
    assert recorder.replays == 8


def test_what_has_not_come_for_longest_is_forgotten():
    recorder = Recorder()
    function = GraphedFunction(scaled, recorder, most=2)
    one, two, three = (torch.ones(size) for size in (1, 2, 3))
    for x in (one, two, one, two, one, three):  # `two` goes
        function(1, x)
    assert recorder.recorded == [(1, one.shape), (1, two.shape)]
    assert len(function.known) == 2
    function(1, one)
    assert len(recorder.recorded) == 2
    function(1, two)
    function(1, two)
    assert recorder.recorded[2:] == [(1, two.shape)]


@pytest.mark.parametrize(
    "error", [RuntimeError("not permitted\nwhile recording"), torch.OutOfMemoryError("full")]
)
def test_what_cannot_be_recorded_runs_as_it_is_for_good(error):
    recorder = Recorder()
    function = GraphedFunction(scaled, recorder)
    for _ in range(2):
        function(1, torch.ones(1))
    recorder.error = error
    for call in range(4):
        x = torch.arange(2.0) + call
        assert torch.equal(function(5, x), 5 * x)
        function(1, torch.ones(1))
    assert len(recorder.recorded) == 2
    assert function.reason == str(error).splitlines()[0]
    assert not function.known


def test_mistakes_of_the_function_itself_are_raised():
    def wrong(x):
        raise ValueError("wrong")

    function = GraphedFunction(wrong, lambda function, given: function(*given))
    for _ in range(3):
        with pytest.raises(ValueError, match="wrong"):
            function(torch.ones(1))
    assert function.reason is None


def test_without_a_recorder_nothing_is_remembered():
    function = GraphedFunction(scaled)
    for _ in range(3):
        assert torch.equal(function(2, torch.ones(2)), torch.full((2,), 2.0))
    assert not function.known
