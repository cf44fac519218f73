"""Messages between server and clients, made of Flower's array, config and metric records."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from numpy.lib import format as npy
from torch import Tensor

from ...flat_params import Tree

MODEL, VISIT, UPLOAD, RESULT = "model", "visit", "upload", "result"  # names of records
FROZEN = "frozen"  # name of the record, and of its numbers, of parameters that are not trained
PROBLEM = "problem"  # name of the record, and of its text, of a client that cannot enrol
BUFFERS = "buffers"  # name of the running statistics among a record's arrays

REPORTS = ("received_loss", "received_gradient")  # metrics of visits that ask for a report
# names in the record RESULT
_METRICS = ("examples", "loss", "first_bad_step", "forgot", *REPORTS)
_MAX_HEADER = 1024  # upper bound on the bytes of a .npy file before its values

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "int32": torch.int32,
    "uint8": torch.uint8,
}


class Visit(NamedTuple):
    """What a client receives in addition to the model. Its reply repeats it."""

    training: str  # id of the training job: a client keeps the state of each job apart
    round: int  # counted from 0
    client: int
    mode: int
    counted: int  # last round in which this client's reply for this mode counted, or -1
    largest: int  # number of examples of the largest client
    steps: int = 0  # local steps; 0 for those that the config says
    report: int = 0  # 1 to report loss and gradient norm of the received model


class UnreadableError(Exception):
    """A record is missing, or its content is not valid."""


def pack(tree: Mapping[str, Tensor]) -> ArrayRecord:
    """Returns tensors as an array record."""
    return ArrayRecord(
        {name: Array(tensor.detach().cpu().contiguous().numpy()) for name, tensor in tree.items()}
    )


def unpack(content: RecordDict, name: str, expected: Mapping[str, Tensor] | None = None) -> Tree:
    """Returns the tensors of a record. Nothing is unpickled.

    Args:
        expected: tensors with the names, shapes and dtypes that the record must have. They are
            compared with the record's own description before anything is decoded, and again with
            the decoded tensors, because the description may be false.
    """
    record = content.array_records.get(name)
    if record is None:
        raise UnreadableError(f"there is no record '{name}'")
    if expected is not None and set(record) != set(expected):
        raise UnreadableError(f"names {sorted(record)} where {sorted(expected)} are expected")
    tree: Tree = {}
    for key, array in record.items():
        like = None if expected is None else expected[key]
        if like is not None:
            _check_like(key, array.dtype, tuple(array.shape), like)
            max_bytes = like.numel() * like.element_size() + _MAX_HEADER
            if len(array.data) > max_bytes:
                raise UnreadableError(
                    f"'{key}' has {len(array.data)} bytes where {max_bytes} are plausible"
                )
        try:
            tree[key] = _decode(array)
        except Exception as error:  # untrusted bytes can make a decoder raise anything
            raise UnreadableError(f"'{key}' cannot be decoded: {error}") from None
        if like is not None:
            dtype = str(tree[key].dtype).removeprefix("torch.")
            _check_like(key, dtype, tuple(tree[key].shape), like)
    return tree


def _decode(array: Array) -> Tensor:
    """Returns the tensor in an array's bytes, which must be a .npy file.

    `numpy.load` would allocate whatever shape the header claims. `frombuffer` only views the bytes
    that have arrived, so that a false header cannot exhaust the memory.
    """
    stream = BytesIO(array.data)
    if array.stype != "numpy.ndarray" or npy.read_magic(stream) != (1, 0):
        raise ValueError("it is not a .npy file of version 1.0")
    shape, fortran_order, dtype = npy.read_array_header_1_0(stream)
    if dtype.name not in DTYPES or (fortran_order and len(shape) > 1):
        raise ValueError(f"it holds {dtype}")
    values = np.frombuffer(array.data, dtype, offset=stream.tell())
    return torch.from_numpy(values.reshape(shape).astype(dtype.newbyteorder("=")))


def _check_like(key: str, dtype: str, shape: tuple[int, ...], like: Tensor) -> None:
    if DTYPES.get(dtype) != like.dtype:
        raise UnreadableError(
            f"'{key}' has type {dtype} where {str(like.dtype).removeprefix('torch.')} is expected"
        )
    if shape != tuple(like.shape):
        raise UnreadableError(
            f"'{key}' has shape {list(shape)} where {list(like.shape)} is expected"
        )


def build_visit_message(
    model: ArrayRecord, visit: Visit, node: int, ttl: float, frozen: Tensor | None = None
) -> Message:
    """Returns the message that asks a client to train a mode.

    Args:
        frozen: fingerprint of the parameters that are not trained, [T, 3]; None if there are none.
    """
    content = _frozen_record(frozen)
    content[MODEL], content[VISIT] = model, ConfigRecord({**visit._asdict()})
    return Message(content, node, MessageType.TRAIN, ttl=ttl, group_id=str(visit.round + 1))


def build_query_message(node: int, ttl: float, frozen: Tensor | None = None) -> Message:
    """Returns the message that asks a client for its identity and number of examples.

    Args:
        frozen: as for `build_visit_message`.
    """
    return Message(_frozen_record(frozen), node, MessageType.QUERY, ttl=ttl, group_id="0")


def _frozen_record(frozen: Tensor | None) -> RecordDict:
    if frozen is None or not len(frozen):
        return RecordDict()
    return RecordDict({FROZEN: ConfigRecord({FROZEN: frozen.flatten().tolist()})})


def read_frozen(content: RecordDict) -> Tensor:
    """Returns the fingerprint of the server's frozen parameters, [T, 3]; [0, 3] without any."""
    values: Any = content.config_records.get(FROZEN, ConfigRecord()).get(FROZEN, [])
    if (
        not isinstance(values, list)
        or len(values) % 3
        or any(type(each) is not float for each in values)
    ):
        raise UnreadableError(f"the record '{FROZEN}' is not that of frozen parameters")
    return torch.tensor(values, dtype=torch.float64).reshape(-1, 3)


def read_problem(content: RecordDict) -> str | None:
    """Returns why a client cannot enrol, as it says in its reply to a query, or None if it can."""
    record = content.config_records.get(PROBLEM)
    return None if record is None else str(record.get(PROBLEM))


def read_visit(content: RecordDict) -> Visit:
    """Returns the visit that a message describes; raises UnreadableError if it is malformed."""
    record = content.config_records.get(VISIT)
    if record is None:
        raise UnreadableError(f"there is no record '{VISIT}'")
    values = [record.get(name) for name in Visit._fields]
    types = (str, *(int,) * (len(Visit._fields) - 1))
    if any(type(value) is not expected for value, expected in zip(values, types, strict=True)):
        raise UnreadableError(f"the record '{VISIT}' is not that of a visit")
    return Visit(*values)  # type: ignore[arg-type]


def check_records(content: RecordDict) -> None:
    """Raises UnreadableError if a reply has records or values that no reply needs.

    It would be transferred and stored, although nothing reads it and `bytes_up` does not count it.
    """
    unexpected = [
        *(name for name in content if name not in (VISIT, UPLOAD, RESULT)),
        *(name for name in content.config_records.get(VISIT, ()) if name not in Visit._fields),
        *(name for name in content.metric_records.get(RESULT, ()) if name not in _METRICS),
    ]
    if unexpected:
        raise UnreadableError(
            f"it has {len(unexpected)} unexpected records or values, such as '{unexpected[0]}'"
        )


def build_reply(message: Message, content: Mapping[str, Any]) -> Message:
    """Returns a reply to a message."""
    return Message(RecordDict(dict(content)), reply_to=message)


def read_metric(content: RecordDict, name: str, kind: type[int] | type[float]) -> Any:
    """Returns a value of a reply's record RESULT; raises UnreadableError if it is not a `kind`."""
    record = content.metric_records.get(RESULT, MetricRecord())
    value = record.get(name)
    if type(value) is not kind:
        raise UnreadableError(f"'{name}' is {value!r}, not a number of type {kind.__name__}")
    return value
