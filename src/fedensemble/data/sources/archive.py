"""Checks the sizes that arrays in a zip archive claim before anything is unpacked.

A zip archive can unpack to a thousand times its size, and the header of an array can claim any
shape. Both sizes are written in the archive, so they can be compared with a limit before memory is
allocated.
"""

import math
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from ...errors import InputError
from ...runtime.hardware import free_memory

VARIABLE = "FEDENSEMBLE_MAX_GB"
_ALWAYS_ALLOWED = 2_000_000_000  # bytes that any file may unpack to
# A larger file may unpack to this many times its own size. Photographs and text reach 2 to 10.
_MAX_RATIO = 20
_HEADER_READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def largest_size(file: Path) -> int:
    """Returns the number of bytes that all arrays read from `file` may take in memory.

    The environment variable FEDENSEMBLE_MAX_GB sets the limit. Without it, the limit is 2 GB or 20
    times the size of the file, whichever is larger, but never more than the free memory.
    """
    text = os.environ.get(VARIABLE)
    if text is None:
        return min(max(_ALWAYS_ALLOWED, _MAX_RATIO * file.stat().st_size), free_memory())
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not 0 < limit < 1e9:
        raise InputError(f"{VARIABLE} must be a number of GB above 0, such as 10; got '{text}'.")
    return int(limit * 1e9)


def check_member(archive: zipfile.ZipFile, name: str) -> tuple[np.dtype[Any], int]:
    """Returns the dtype and the number of elements that the header of an array claims.

    Raises:
        ValueError: the header does not match the size of the archive member.
    """
    size = archive.getinfo(name).file_size
    with archive.open(name) as member:
        version = npy.read_magic(member)
        if version not in _HEADER_READERS:
            raise ValueError(f"its header has version {version[0]}.{version[1]}")
        shape, _, dtype = _HEADER_READERS[version](member)
        if not all(isinstance(side, int) and side >= 0 for side in shape):
            raise ValueError(f"its header has shape {shape}")
        count = math.prod(shape)
        if not dtype.hasobject and member.tell() + count * dtype.itemsize != size:
            raise ValueError(
                f"its header has shape {shape} of {dtype}, which does not fit its {size} bytes"
            )
    return dtype, count
