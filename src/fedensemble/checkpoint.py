"""Tensors and facts in one safetensors file with a checksum, written atomically.

The checksum has no key: it shows damage, not forgery. Whoever can write the file can compute
another one.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .durable import write_bytes, write_json, write_pieces
from .errors import StoreError

__all__ = [
    "check_start",
    "read_checkpoint",
    "write_bytes",
    "write_checkpoint",
    "write_json",
    "write_pieces",
]

_ENTRY = "fedensemble"  # in the file's metadata
_PIECE = 1 << 24  # bytes
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_checkpoint(
    path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], *, private: bool = False
) -> None:
    """Writes tensors and JSON-able facts to one file that can be checked.

    Tensors on the CPU are written as they lie there, without a copy: a memory-mapped one may exceed
    memory.

    Args:
        private: only this user may read the file and the folders that are made for it.
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
            "dtype": _TYPES[held[name].dtype],
            "shape": list(held[name].shape),
            "data_offsets": [start, end],
        }
    header = json.dumps(described, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    start_of_file = struct.pack("<Q", len(header)) + header
    write_pieces(
        path, chain([start_of_file], *(_pieces(held[name]) for name in names)), private=private
    )


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and facts of a checkpoint; raises StoreError if the file is missing, cut short or
    changed.
    """
    try:
        if not path.is_file():
            raise StoreError(f"There is no checkpoint at {path}.")
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except StoreError:
        raise
    except (
        SafetensorError,
        OSError,
        struct.error,
        RuntimeError,
        ValueError,
        TypeError,
        KeyError,
    ) as error:
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
    """Raises StoreError if a file that is there was cut short or is of another kind; does not read
    its tensors.
    """
    if path.is_file():
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError, struct.error, RuntimeError, ValueError) as error:
            raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> StoreError:
    return StoreError(f"{path} is damaged or no checkpoint: {str(error).rstrip('.')}.")


def _checksum(tensors: Mapping[str, Tensor], text: str) -> str:
    digest = sha256(text.encode(errors="surrogatepass"))
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
