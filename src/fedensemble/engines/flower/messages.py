"""What travels between server and clients: tensors in Flower's own array records, words in its
config records.
"""

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
BUFFERS = "buffers"  # running statistics, among a record's arrays

_NUMBERS = ("examples", "loss", "first_bad_step", "forgot")  # of a result
_HEADER = 1024  # most bytes that a .npy file has before its values

TYPES = {"float32": torch.float32, "float64": torch.float64, "uint8": torch.uint8}


class Visit(NamedTuple):
    """What a client is told beside the model; its answer repeats it."""

    training: str  # a name for the whole training, so that a client never mixes up two of them
    round: int  # counted from 0
    client: int
    mode: int
    counted: int  # the last round whose answer of this client for this mode counted, or -1
    largest: int  # examples of the largest client


class UnreadableError(Exception):
    """A record that is missing, or does not hold what it should."""


def pack(tree: Mapping[str, Tensor]) -> ArrayRecord:
    """Tensors as a record."""
    return ArrayRecord(
        {name: Array(tensor.detach().cpu().contiguous().numpy()) for name, tensor in tree.items()}
    )


def unpack(content: RecordDict, name: str, expected: Mapping[str, Tensor] | None = None) -> Tree:
    """The tensors of a record; nothing is unpickled.

    Args:
        expected: tensors with the names, shapes and types that the record must have. They are
            compared with what the record says of itself before a byte is decoded, and with what was
            decoded.
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
            _compare(key, array.dtype, tuple(array.shape), like)
            most = like.numel() * like.element_size() + _HEADER
            if len(array.data) > most:
                raise UnreadableError(
                    f"'{key}' has {len(array.data)} bytes where {most} are plausible"
                )
        try:
            tree[key] = _decode(array)
        except Exception as error:  # whatever a stranger's bytes make of a decoder
            raise UnreadableError(f"'{key}' cannot be decoded: {error}") from None
        if like is not None:
            _compare(key, str(tree[key].dtype).removeprefix("torch."), tuple(tree[key].shape), like)
    return tree


def _decode(array: Array) -> Tensor:
    """The tensor in an array's bytes, which are a .npy file; what its header claims is never
    allocated unseen.
    """
    stream = BytesIO(array.data)
    if array.stype != "numpy.ndarray" or npy.read_magic(stream) != (1, 0):
        raise ValueError("it is not a .npy file of version 1.0")
    shape, column_order, dtype = npy.read_array_header_1_0(stream)
    if dtype.name not in TYPES or (column_order and len(shape) > 1):
        raise ValueError(f"it holds {dtype}")
    values = np.frombuffer(array.data, dtype, offset=stream.tell())
    return torch.from_numpy(values.reshape(shape).astype(dtype.newbyteorder("=")))


def _compare(key: str, dtype: str, shape: tuple[int, ...], like: Tensor) -> None:
    if TYPES.get(dtype) != like.dtype:
        raise UnreadableError(
            f"'{key}' has type {dtype} where {str(like.dtype).removeprefix('torch.')} is expected"
        )
    if shape != tuple(like.shape):
        raise UnreadableError(
            f"'{key}' has shape {list(shape)} where {list(like.shape)} is expected"
        )


def visit_message(model: ArrayRecord, visit: Visit, node: int, ttl: float) -> Message:
    """The message that asks a client to train a mode."""
    content = RecordDict({MODEL: model, VISIT: ConfigRecord({**visit._asdict()})})
    return Message(content, node, MessageType.TRAIN, ttl=ttl, group_id=str(visit.round + 1))


def query_message(node: int, ttl: float) -> Message:
    """The message that asks a client who it is."""
    return Message(RecordDict(), node, MessageType.QUERY, ttl=ttl, group_id="0")


def read_visit(content: RecordDict) -> Visit:
    """What a message says of its visit."""
    record = content.config_records.get(VISIT)
    if record is None:
        raise UnreadableError(f"there is no record '{VISIT}'")
    values = [record.get(name) for name in Visit._fields]
    kinds = (str, int, int, int, int, int)
    if any(type(value) is not kind for value, kind in zip(values, kinds, strict=True)):
        raise UnreadableError(f"the record '{VISIT}' is not that of a visit")
    return Visit(*values)  # type: ignore[arg-type]


def check_records(content: RecordDict) -> None:
    """Raises if an answer carries more than an answer has: what nobody reads is not paid for,
    counted or stored.
    """
    more = [
        *(name for name in content if name not in (VISIT, UPLOAD, RESULT)),
        *(name for name in content.config_records.get(VISIT, ()) if name not in Visit._fields),
        *(name for name in content.metric_records.get(RESULT, ()) if name not in _NUMBERS),
    ]
    if more:
        raise UnreadableError(
            f"it has {len(more)} records or values that nobody asked for, such as '{more[0]}'"
        )


def reply(message: Message, content: Mapping[str, Any]) -> Message:
    """An answer to a message."""
    return Message(RecordDict(dict(content)), reply_to=message)


def number(content: RecordDict, name: str, kind: type[int] | type[float]) -> Any:
    """One of an answer's numbers."""
    record = content.metric_records.get(RESULT, MetricRecord())
    value = record.get(name)
    if type(value) is not kind:
        raise UnreadableError(f"'{name}' is {value!r}, not a number of type {kind.__name__}")
    return value
