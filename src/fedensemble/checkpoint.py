"""Files that are whole or not there: tensors and facts in one safetensors file with a checksum, written atomically."""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .errors import StoreError

_ENTRY = "fedensemble"  # in the file's metadata
_PIECE = 1 << 24  # bytes
_TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file so that a reader sees the old content or the new, never a part; also across a power cut."""
    write_pieces(path, [content])


def write_pieces(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """As `write_bytes`, piece after piece, so that the whole need not fit into memory."""
    spare = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(spare, "wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(spare, path)
    except OSError as error:
        spare.unlink(missing_ok=True) if spare.parent.is_dir() else None
        raise StoreError(f"Could not write {path}: {_reason(error)}") from None


def write_json(path: Path, content: Any) -> None:
    """Writes JSON that reads well and is the same for the same content."""
    write_bytes(path, (json.dumps(content, indent=2) + "\n").encode())


def write_checkpoint(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Writes tensors and JSON-able facts to one file that can be checked.

    Tensors on the CPU are written as they lie there, without a copy: a memory-mapped one may exceed memory.
    """
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(facts, sort_keys=True)
    # One entry: the order of several is not fixed, and the same content must give the same bytes.
    entry = json.dumps({"facts": text, "sha256": _checksum(held, text)})
    names = sorted(held, key=lambda name: (-held[name].element_size(), name))  # everything aligned
    described: dict[str, Any] = {"__metadata__": {_ENTRY: entry}}
    end = 0
    for name in names:
        start, end = end, end + held[name].numel() * held[name].element_size()
        described[name] = {
            "dtype": _TYPES[held[name].dtype], "shape": list(held[name].shape), "data_offsets": [start, end]
        }  # fmt: skip
    header = json.dumps(described, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    start_of_file = struct.pack("<Q", len(header)) + header
    write_pieces(path, chain([start_of_file], *(_pieces(held[name]) for name in names)))


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and facts of a checkpoint; raises StoreError if the file is missing, cut short or changed."""
    if not path.is_file():
        raise StoreError(f"There is no checkpoint at {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError, struct.error, RuntimeError, ValueError, TypeError, KeyError) as error:
        raise _damaged(path, error) from None
    if _ENTRY not in metadata:
        raise StoreError(f"{path} is a safetensors file, but not one of fedensemble's checkpoints.")
    try:
        entry = json.loads(metadata[_ENTRY])
        text, checksum = str(entry["facts"]), entry["sha256"]
        expected = _checksum(tensors, text)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise StoreError(f"{path} is damaged: its description cannot be read.") from None
    if checksum != expected:
        raise StoreError(f"{path} is damaged: its checksum does not fit its content.")
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict):
        raise StoreError(f"{path} is damaged: its description cannot be read.")
    return tensors, facts


def check_start(path: Path) -> None:
    """Raises StoreError if a file that is there was cut short or is of another kind; does not read its tensors."""
    if path.is_file():
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError, struct.error, RuntimeError, ValueError) as error:
            raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> StoreError:
    return StoreError(f"{path} is damaged or no checkpoint: {str(error).rstrip('.')}.")


def _checksum(tensors: Mapping[str, Tensor], text: str) -> str:
    digest = sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        for piece in _pieces(tensor.contiguous()):
            digest.update(piece)
    return digest.hexdigest()


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, piece after piece."""
    if tensor.numel():
        flat = tensor.flatten().view(torch.uint8).numpy().data
        for start in range(0, len(flat), _PIECE):
            yield flat[start : start + _PIECE]


def _reason(error: OSError) -> str:
    known = {
        errno.ENOSPC: "the disk is full. Free some space and run the same command again; finished work is kept.",
        errno.EACCES: "no write permission. Choose another folder, or change its permissions.",
        errno.EPERM: "no write permission. Choose another folder, or change its permissions.",
        errno.EROFS: "the file system is read-only. Choose another folder.",
        errno.ENOTDIR: "a part of its path is a file, not a folder.",
        errno.EEXIST: "a part of its path is a file, not a folder.",
    }
    return known.get(error.errno or 0, str(error))
