"""Clients' answers on the wire: whatever one of them sends, the round goes on and the modes stay
finite.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

import fedensemble as fe
from fedensemble.engines.flower.deadline import RoundTimeout
from fedensemble.engines.flower.messages import (
    RESULT,
    UPLOAD,
    VISIT,
    UnreadableError,
    read_metric,
    read_visit,
    unpack,
)
from fedensemble.testing.toy_problems import small_federation

from ..unit.engines.flower.fake import FakeFleet
from .budget import examples, generators, mutated

BAD = 2  # the client whose answers are changed
ODD = (
    -1,
    0,
    1,
    7,
    10**15,
    2**63 - 1,
    0.5,
    -3.0,
    1e30,
    float("nan"),
    float("inf"),
    "x",
    b"x",
    "\x1b[31m\n",
    True,
)


def odd_array(array: Array, random: np.random.Generator) -> Array:
    """An array whose bytes, shape, type or kind are others."""
    dtype, shape, stype, data = array.dtype, tuple(array.shape), array.stype, array.data
    kind = random.integers(6)
    if kind == 0:
        data = mutated(
            data, random, (b"(999999999999,)", b"'|O'", b"'<f4'", b"\x80\x04\x95.", b"(-1,)")
        )
    elif kind == 1:
        shape = (*shape[:-1], int(random.choice([0, 1, 10**12])))
    elif kind == 2:
        dtype = str(random.choice(["float32", "float64", "object", "uint8", "x"]))
    elif kind == 3:
        stype = str(random.choice(["pickle", "", "numpy.ndarray "]))
    else:
        start, size = data.index(b"\n") + 1, np.dtype("f8").itemsize
        values = np.frombuffer(data[start:], "u1").copy()
        if len(values) >= size:
            at = int(random.integers(len(values) // size)) * size
            odd = np.array(random.choice([np.nan, np.inf, 1e30, -1e300, 1e-320, 0.0]))
            values[at : at + size] = np.frombuffer(odd.tobytes(), "u1")
        data = data[:start] + values.tobytes()
    return Array(dtype, shape, stype, data)


def bend(random: np.random.Generator) -> Any:
    """A misbehavior of a client: one to three records of its answer are others."""

    def bent(message: Any, answer: Any) -> list[Any]:
        content = answer.content
        for _ in range(random.integers(1, 4)):
            record = str(random.choice([VISIT, RESULT, UPLOAD]))
            if record not in content or not random.integers(12):
                content.pop(record, None)
                continue
            held = dict(content[record].items())
            name = sorted(held)[random.integers(len(held))] if held else "x"
            if record == UPLOAD:
                held = {name: odd_array(held[name], random)} if held and random.integers(5) else {}
                content[record] = ArrayRecord(
                    {**dict(content[record].items()), **held} if random.integers(4) else held
                )
                continue
            value = ODD[random.integers(len(ODD))]
            kinds = (int, float) if record == RESULT else (int, float, str, bytes)
            if type(value) in kinds:
                content[record] = (MetricRecord if record == RESULT else ConfigRecord)(
                    {**held, name: value}
                )
        return [answer]

    return bent


@pytest.mark.parametrize(
    "method", [fe.FedAvg(), fe.Scaffold(), fe.QSGD(compressor="dither", levels=4), fe.Diana()]
)
@pytest.mark.filterwarnings("ignore")
def test_answers(method: fe.Algorithm) -> None:
    federation = small_federation(method, "loop", modes=2, strata=1)
    federation.schedule = fe.Stratified(modes=2, strata=1, clients_per_round=6)
    fleet = FakeFleet(federation, {"round_timeout": RoundTimeout(timeout=20.0)})
    fleet.serve()
    for random in generators(5, 15):
        fleet.node(BAD).bend = bend(random)
        [(report, _)] = fleet.rounds(1)
        assert report.loss is not None and np.isfinite(report.loss)
        assert all(bool(value.isfinite().all()) for value in fleet.state.modes.values())


def read(action: Callable[[], Any]) -> Any:
    """What an action returns, or None if it says that a record cannot be read."""
    reason = ""
    try:
        return action()
    except UnreadableError as error:
        reason = str(error)
    assert 0 < len(reason) < 2000
    return None


NAMES = st.sampled_from(["theta", "buffers", "x", ""])
ARRAYS = st.builds(
    Array,
    st.sampled_from(["float32", "float64", "object", "x"]),
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
    st.sampled_from(["numpy.ndarray", "pickle"]),
    st.binary(max_size=90),
)


@given(st.dictionaries(NAMES, ARRAYS, max_size=2), st.booleans())
@examples(150)
def test_records_of_any_bytes(arrays: dict[str, Array], known: bool) -> None:
    expected = {"theta": torch.zeros(3)} if known else None
    tree = read(lambda: unpack(RecordDict({UPLOAD: ArrayRecord(arrays)}), UPLOAD, expected))
    assert tree is None or expected is None or [t.shape for t in tree.values()] == [(3,)]


@given(
    st.dictionaries(
        st.sampled_from(["round", "client", "mode", "training", "examples", "loss"]),
        st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(max_size=5),
    )
)
@examples(100)
def test_words_of_any_kind(values: dict[str, Any]) -> None:
    numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
    content = RecordDict({VISIT: ConfigRecord(values), RESULT: MetricRecord(numbers)})
    read(lambda: read_visit(content))
    read(lambda: read_metric(content, "loss", float))
    read(lambda: read_metric(content, "examples", int))
