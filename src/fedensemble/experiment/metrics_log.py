"""The file metrics.jsonl: one JSON record per round, and a compressed copy of it for
checkpoints.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import durable
from ..errors import StoreError

BLOCK = 1 << 14  # bytes of text that are compressed together


class MetricsLog:
    """Records of a run's rounds, in a file that only grows.

    A checkpoint takes a copy along (`packed`), so that it needs no other file: whatever became of
    metrics.jsonl, a run that resumes from the checkpoint ends with the same bytes. The copy is
    compressed in blocks of fixed size, and each block is compressed once; taking a checkpoint costs
    the last block and a copy, and reads nothing from disk.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start(b"")
        self._known = False  # whether the fields below describe the file

    def read(self) -> bytes:
        """The file's content; empty if there is none."""
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise StoreError(f"Cannot read {self.path}: {durable.reason(error)}") from None

    def records(self) -> list[dict[str, Any]]:
        """The records of the lines that are complete."""
        lines = self.read().split(b"\n")[:-1]  # what follows the last newline was cut short
        found = []
        for number, line in enumerate(lines, 1):
            record = _parse(line)
            if record is None:
                raise StoreError(
                    f"{self.path} is damaged: line {number} is not the record of a round."
                )
            found.append(record)
        return found

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds the record of a round; it is durable after the next `sync`."""
        if not self._known:
            self._start(self.read())
        line = (json.dumps(record) + "\n").encode()
        with durable.appending(self.path) as descriptor:
            durable.disk.write(descriptor, line)
        self._add(line)

    def sync(self) -> None:
        """Makes all records durable."""
        if self.size or self.path.exists():
            durable.sync_file(self.path)

    def facts(self) -> dict[str, Any]:
        """Length and hash of the file, found without reading it."""
        if not self._known:
            self._start(self.read())
        return {"metrics_bytes": self.size, "metrics_sha256": self._digest.copy().hexdigest()}

    def packed(self) -> Tensor:
        """The whole file, compressed, as a tensor of bytes; a function of the content alone."""
        if not self._known:
            self._start(self.read())
        packed = b"".join(
            [*self._blocks, zlib.compress(self._rest)] if self._rest else self._blocks
        )
        return torch.from_numpy(np.frombuffer(packed, np.uint8).copy())

    def restore(self, content: bytes) -> bool:
        """Makes this the file's content; returns whether the file held all of it."""
        before = self.read()
        if before != content:
            durable.write_bytes(self.path, content)
        self._start(content)
        return before.startswith(content)

    def salvage(self, rounds: int) -> bytes:
        """The first lines of the file that are records of rounds 1, 2, ... up to `rounds`."""
        kept = b""
        for number, line in enumerate(self.read().split(b"\n")[:-1][:rounds], 1):
            record = _parse(line)
            if record is None or record["round"] != number:
                break
            kept += line + b"\n"
        return kept

    def _start(self, content: bytes) -> None:
        self._digest, self._blocks, self._rest, self.size = sha256(), list[bytes](), b"", 0
        self._add(content)
        self._known = True

    def _add(self, text: bytes) -> None:
        self._digest.update(text)
        self.size += len(text)
        self._rest += text
        full = len(self._rest) - len(self._rest) % BLOCK
        self._blocks += [
            zlib.compress(self._rest[start : start + BLOCK]) for start in range(0, full, BLOCK)
        ]
        self._rest = self._rest[full:]


def unpack(packed: Tensor, size: int) -> bytes | None:
    """The text that `packed` gave, of `size` bytes; None if it is not that. Never makes more than
    `size` bytes.
    """
    if packed.dtype != torch.uint8 or size < 0:
        return None
    rest, parts, left = packed.numpy().tobytes(), list[bytes](), size
    try:
        while rest:
            block = zlib.decompressobj()
            parts.append(block.decompress(rest, left + 1))
            left -= len(parts[-1])
            if left < 0 or not block.eof:
                return None
            rest = block.unused_data
    except zlib.error:
        return None
    return b"".join(parts) if left == 0 else None


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("round"), int) else None
