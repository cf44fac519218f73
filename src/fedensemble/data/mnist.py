"""MNIST from the official IDX files: 28x28 grey images of ten digits (LeCun, Cortes and Burges,
1998).
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .dataset import Source, bad_file, find_file, read_bytes, sources
from .normalize import Standardise

SIDE = 28
CLASSES = 10
# Mean and standard deviation of the training pixels, for values 0..255.
STANDARDISE = Standardise(mean=(0.1307 * 255,), std=(0.3081 * 255,))
UNSIGNED_BYTE = 0x08  # the only element type these files have


@sources.register("mnist")
def mnist(*, root: Path | None = None) -> Source:
    """MNIST: 60,000 training and 10,000 test images, uint8 [n, 1, 28, 28], labels 0..9.

    Args:
        root: data folder; the files are in its folder mnist or MNIST/raw, packed (.gz) or not.
    """
    x, y, files = read_pair("train", root)
    x_test, y_test, test_files = read_pair("t10k", root)
    info = {"source": "mnist", "files": files + test_files}
    return Source(x, y, x_test, y_test, classes=CLASSES, standardise=STANDARDISE, info=info)


def read_pair(part: str, root: Path | None) -> tuple[NDArray[Any], NDArray[Any], list[str]]:
    """Images [n, 1, 28, 28], labels [n] and the two files' names, of the part "train" or "t10k"."""
    image_file = find_idx(f"{part}-images-idx3-ubyte", root)
    label_file = find_idx(f"{part}-labels-idx1-ubyte", root)
    images, labels = read_idx(image_file, axes=3), read_idx(label_file, axes=1)
    if images.shape[1:] != (SIDE, SIDE):
        raise bad_file(
            image_file, f"expected images of {SIDE}x{SIDE}, got {images.shape[1]}x{images.shape[2]}"
        )
    if len(images) != len(labels):
        raise bad_file(
            label_file,
            f"expected {len(images)} labels, one an image of {image_file.name}, got {len(labels)}",
        )
    if len(labels) and labels.max() >= CLASSES:
        raise bad_file(label_file, f"expected labels 0 to {CLASSES - 1}, got {labels.max()}")
    return images[:, None], labels.astype(np.int64), [str(image_file), str(label_file)]


def find_idx(name: str, root: Path | None) -> Path:
    """The file of this name, in either folder, packed or not."""
    folders = ("mnist", "MNIST/raw")
    return find_file(
        "mnist", root, [f"{folder}/{name}{end}" for folder in folders for end in (".gz", "")]
    )


def read_idx(path: Path, axes: int) -> NDArray[np.uint8]:
    """The array of bytes in an IDX file: two zero bytes, element type, number of axes, big-endian
    sizes, elements.
    """
    content = read_bytes(path)
    magic, header = bytes([0, 0, UNSIGNED_BYTE, axes]), 4 + 4 * axes
    if content[:4] != magic:
        raise bad_file(
            path,
            f"expected it to begin with {magic.hex()} (IDX), got {content[:4].hex() or 'an empty file'}",
        )
    if len(content) < header:
        raise bad_file(path, f"expected a header of {header} bytes, got {len(content)}")
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", count=axes, offset=4))
    expected = int(np.prod(shape, dtype=object))
    if len(content) - header != expected:
        sizes = "x".join(map(str, shape))
        raise bad_file(
            path,
            f"expected {expected} bytes after the header ({sizes}), got {len(content) - header}",
        )
    # A copy: the bytes of a file cannot be written to, and torch warns about that.
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape).copy()
