"""Sizes that arrays in a zip archive claim, checked before anything is unpacked.

A zip archive can unpack to a thousand times its size, and the header of an array can claim any
shape. Both sizes are written in the archive, so that they can be compared with a limit before
memory is allocated.
"""

import math
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from ..errors import InputError
from ..runtime.hardware import free_memory

VARIABLE = "FEDENSEMBLE_MAX_GB"
_ALWAYS = 2_000_000_000  # bytes that any file may unpack to
# how many times its own size a larger file may unpack to; photographs and text reach 2 to 10
_RATIO = 20
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def largest_size(file: Path) -> int:
    """Bytes that the arrays read from a file may take: $FEDENSEMBLE_MAX_GB, or by default 2 GB or
    20 times its size.

    Without the variable it is never more than the memory that is free.
    """
    given = os.environ.get(VARIABLE)
    if given is None:
        return min(max(_ALWAYS, _RATIO * file.stat().st_size), free_memory())
    try:
        limit = float(given)
    except ValueError:
        limit = math.nan
    if not 0 < limit < 1e9:
        raise InputError(f"{VARIABLE} must be a number of GB above 0, such as 10; got '{given}'.")
    return int(limit * 1e9)


def check_member(archive: zipfile.ZipFile, name: str) -> tuple[np.dtype[Any], int]:
    """Type and number of elements that a member's header claims; raises ValueError if the member
    has another size.
    """
    size = archive.getinfo(name).file_size
    with archive.open(name) as member:
        version = npy.read_magic(member)
        if version not in _HEADERS:
            raise ValueError(f"its header has version {version[0]}.{version[1]}")
        shape, _, dtype = _HEADERS[version](member)
        if not all(isinstance(side, int) and side >= 0 for side in shape):
            raise ValueError(f"its header has shape {shape}")
        count = math.prod(shape)
        if not dtype.hasobject and member.tell() + count * dtype.itemsize != size:
            raise ValueError(
                f"its header has shape {shape} of {dtype}, which does not fit its {size} bytes"
            )
    return dtype, count
