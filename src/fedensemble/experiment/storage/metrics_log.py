"""The file metrics.jsonl, with one JSON record per round; checkpoints hold a compressed copy."""

from __future__ import annotations

import json
import math
import time
import zlib
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ... import durable
from ...errors import StoreError

BLOCK = 1 << 14  # bytes of text that are compressed together


class MetricsLog:
    """Records of a run's rounds, in an append-only file.

    Each checkpoint contains a copy (`packed`), so that it depends on no other file: even if
    metrics.jsonl is damaged or deleted, a run that resumes from the checkpoint ends with the same
    bytes. The copy is compressed in blocks of fixed size, and each block is compressed once.
    Writing a checkpoint therefore compresses only the last block, and reads nothing from disk.

    Attributes:
        path: the file.
        delay: seconds between two writes; records in between wait in memory. Opening the file for
            every record takes longer than a round of a small model in a large batch.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.delay = path, 0.0
        self._waiting, self._written_at = b"", -math.inf
        self._start(b"")
        # The digest, blocks and size describe an empty log until the file has been read.
        self._loaded = False

    def read(self) -> bytes:
        """Returns the content of the file; empty if it does not exist."""
        self.flush()
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise StoreError(
                f"Cannot read {self.path}: {durable.describe_os_error(error)}"
            ) from None

    def records(self) -> list[dict[str, Any]]:
        """Returns the records of all complete lines."""
        # A process that was killed may have left an incomplete line after the last newline.
        lines = self.read().split(b"\n")[:-1]
        records = []
        for number, line in enumerate(lines, 1):
            record = _parse(line)
            if record is None:
                raise StoreError(
                    f"{self.path} is damaged: line {number} is not the record of a round."
                )
            records.append(record)
        return records

    def append(self, record: Mapping[str, Any]) -> None:
        """Appends the record of a round; it is durable after the next `sync`."""
        self._load()
        line = encode_record(record)
        self._waiting += line
        if time.monotonic() - self._written_at >= self.delay:
            self.flush()
        self._add(line)

    def flush(self) -> None:
        """Writes the records that wait in memory."""
        if not self._waiting:
            return
        with durable.appending(self.path) as descriptor:
            durable.disk.write(descriptor, self._waiting)
        self._waiting, self._written_at = b"", time.monotonic()

    def sync(self) -> None:
        """Makes all records durable."""
        self.flush()
        if self.size or self.path.exists():
            durable.sync_file(self.path)

    def facts(self) -> dict[str, Any]:
        """Returns length and hash of the file, without reading it again."""
        self._load()
        return {"metrics_bytes": self.size, "metrics_sha256": self._digest.copy().hexdigest()}

    def packed(self) -> Tensor:
        """Returns the compressed file as a uint8 tensor.

        The result depends on the content alone, not on how often it was appended to, so that equal
        runs write equal checkpoints.
        """
        self._load()
        last_block = [zlib.compress(self._rest)] if self._rest else []
        packed = b"".join([*self._blocks, *last_block])
        return torch.from_numpy(np.frombuffer(packed, np.uint8).copy())

    def restore(self, content: bytes) -> bool:
        """Sets the content of the file; returns whether the file began with it already."""
        before = self.read()
        if before != content:
            durable.write_bytes(self.path, content)
        self._start(content)
        return before.startswith(content)

    def salvage(self, rounds: int) -> bytes:
        """Returns the leading lines that are intact records of rounds 1, 2, ..., `rounds`."""
        intact = b""
        for number, line in enumerate(self.read().split(b"\n")[:-1][:rounds], 1):
            record = _parse(line)
            if record is None or record["round"] != number:
                break
            intact += line + b"\n"
        return intact

    def _load(self) -> None:
        """Reads the file, unless this object knows its content already."""
        if not self._loaded:
            self._start(self.read())

    def _start(self, content: bytes) -> None:
        self._digest, self._blocks, self._rest, self.size = sha256(), list[bytes](), b"", 0
        self._add(content)
        self._loaded = True

    def _add(self, text: bytes) -> None:
        self._digest.update(text)
        self.size += len(text)
        self._rest += text
        full = len(self._rest) - len(self._rest) % BLOCK  # bytes that fill whole blocks
        self._blocks += [
            zlib.compress(self._rest[start : start + BLOCK]) for start in range(0, full, BLOCK)
        ]
        self._rest = self._rest[full:]


def encode_record(record: Mapping[str, Any]) -> bytes:
    """Returns the line of a record."""
    return (json.dumps(record) + "\n").encode()


def decode_records(content: bytes) -> list[dict[str, Any]]:
    """Returns the records of the leading lines that are intact."""
    records = []
    for line in content.split(b"\n")[:-1]:
        record = _parse(line)
        if record is None:
            break
        records.append(record)
    return records


def unpack(packed: Tensor, size: int) -> bytes | None:
    """Returns the content of a log from `MetricsLog.packed`; None if it is not `size` bytes long.

    At most `size` + 1 bytes are decompressed: a forged checkpoint cannot exhaust the memory.
    """
    if packed.dtype != torch.uint8 or size < 0:
        return None
    compressed, parts, bytes_left = packed.numpy().tobytes(), list[bytes](), size
    try:
        while compressed:
            block = zlib.decompressobj()
            parts.append(block.decompress(compressed, bytes_left + 1))
            bytes_left -= len(parts[-1])
            if bytes_left < 0 or not block.eof:
                return None
            compressed = block.unused_data
    except zlib.error:
        return None
    return b"".join(parts) if bytes_left == 0 else None


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("round"), int) else None
