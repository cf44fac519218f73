"""Checkpoints: tensors and JSON metadata in one safetensors file with a checksum.

This is the file format. `experiment/storage/run_folder.py` decides when and where a run writes it.

Files are written atomically. The checksum has no key, so it detects damage, not forgery: anyone who
can write the file can also compute its checksum.
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

_ENTRY = "fedensemble"  # key in the file's metadata
_PIECE_BYTES = 1 << 24
_DTYPES = {  # safetensors' names
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
    """Writes tensors and JSON-serializable facts to one file with a checksum.

    The file is assembled here, because safetensors' own writer copies all tensors first. Contiguous
    CPU tensors are streamed to the file without a copy, so a memory-mapped tensor may be larger
    than memory.

    Args:
        private: only this user may read the file and the folders that are created for it.
    """
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(facts, sort_keys=True)
    # Only one metadata entry, because safetensors does not fix the order of several, and the same
    # content must give the same bytes.
    entry = json.dumps({"facts": text, "sha256": _checksum(on_cpu, text)})
    # Tensors with the largest elements first, so that each one starts at a multiple of its element
    # size.
    names = sorted(on_cpu, key=lambda name: (-on_cpu[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {_ENTRY: entry}}
    end = 0
    for name in names:
        tensor = on_cpu[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    header_bytes = json.dumps(header, separators=(",", ":")).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)
    file_start = struct.pack("<Q", len(header_bytes)) + header_bytes
    write_pieces(
        path, chain([file_start], *(_pieces(on_cpu[name]) for name in names)), private=private
    )


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and facts of a checkpoint; raises StoreError if the file is missing or damaged."""
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
        raise StoreError(f"{path} is damaged: its checksum does not match its content.")
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict):
        raise StoreError(f"{path} is damaged: its description cannot be read.")
    return tensors, facts


def check_start(path: Path) -> None:
    """Raises StoreError if an existing file is truncated or not safetensors; reads no tensors."""
    if path.is_file():
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError, struct.error, RuntimeError, ValueError) as error:
            raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> StoreError:
    return StoreError(f"{path} is damaged or no checkpoint: {str(error).rstrip('.')}.")


def _checksum(tensors: Mapping[str, Tensor], text: str) -> str:
    """SHA-256 of the facts' JSON text and of all tensors with their names, dtypes and shapes."""
    digest = sha256(text.encode(errors="surrogatepass"))
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        for piece in _pieces(tensor.contiguous()):
            digest.update(piece)
    return digest.hexdigest()


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a contiguous tensor, piece by piece, without a copy."""
    if tensor.numel():
        data = tensor.flatten().view(torch.uint8).numpy().data
        for start in range(0, len(data), _PIECE_BYTES):
            yield data[start : start + _PIECE_BYTES]
