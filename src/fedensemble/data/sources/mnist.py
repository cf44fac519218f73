"""MNIST and Fashion-MNIST: 28x28 gray images of digits and of clothes, official IDX files.

References: LeCun, Cortes, Burges, "The MNIST database of handwritten digits", 1998; Xiao, Rasul,
Vollgraf, "Fashion-MNIST: a novel image dataset for benchmarking machine learning algorithms", 2017.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..dataset import Dataset, bad_file_error, datasets, find_file, read_bytes
from ..normalize import Standardise

SIDE = 28
CLASSES = 10
# Mean and standard deviation of the training pixels, for values 0..255.
STANDARDISE = Standardise(mean=(0.1307 * 255,), std=(0.3081 * 255,))
FASHION_STANDARDISE = Standardise(mean=(0.2860 * 255,), std=(0.3530 * 255,))
FASHION_NAMES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
# Where the files may be, below the data folder. An absolute path stands for itself: the last one is
# that of Debian's package dataset-fashion-mnist.
FOLDERS = {
    "mnist": ("mnist", "MNIST/raw"),
    "fashion-mnist": (
        "fashion-mnist",
        "FashionMNIST/raw",
        "/usr/share/datasets/fashion-mnist",
    ),
}
UNSIGNED_BYTE = 0x08  # the only element type of these files


@datasets.register("mnist")
def mnist(*, root: Path | None = None) -> Dataset:
    """MNIST: 60,000 training and 10,000 test images, uint8 [n, 1, 28, 28], labels 0..9.

    Args:
        root: data folder, with the files in its subfolder mnist or MNIST/raw, compressed (.gz) or
            not.
    """
    return load_idx("mnist", root, tuple(str(digit) for digit in range(CLASSES)), STANDARDISE)


@datasets.register("fashion-mnist")
def fashion_mnist(*, root: Path | None = None) -> Dataset:
    """Fashion-MNIST: 60,000 training and 10,000 test images of clothes, as those of MNIST.

    Args:
        root: data folder, with the files in its subfolder fashion-mnist or FashionMNIST/raw,
            compressed (.gz) or not. Files of Debian's package dataset-fashion-mnist are found, too.
    """
    return load_idx("fashion-mnist", root, FASHION_NAMES, FASHION_STANDARDISE)


def load_idx(
    name: str, root: Path | None, class_names: tuple[str, ...], standardise: Standardise
) -> Dataset:
    """Returns a dataset of four IDX files."""
    x, y, files = read_split(name, "train", root)
    x_test, y_test, test_files = read_split(name, "t10k", root)
    info = {"source": name, "files": files + test_files}
    return Dataset(
        x, y, x_test, y_test, class_names=class_names, standardise=standardise, info=info
    )


def read_split(
    name: str, split: str, root: Path | None
) -> tuple[NDArray[Any], NDArray[Any], list[str]]:
    """Returns images [n, 1, 28, 28], labels [n] and the two file names of a split.

    Args:
        name: of the dataset.
        split: "train" or "t10k".
    """
    image_file = find_idx_file(name, f"{split}-images-idx3-ubyte", root)
    label_file = find_idx_file(name, f"{split}-labels-idx1-ubyte", root)
    images, labels = read_idx(image_file, ndim=3), read_idx(label_file, ndim=1)
    if images.shape[1:] != (SIDE, SIDE):
        raise bad_file_error(
            image_file, f"expected images of {SIDE}x{SIDE}, got {images.shape[1]}x{images.shape[2]}"
        )
    if len(images) != len(labels):
        raise bad_file_error(
            label_file,
            f"expected {len(images)} labels, one per image of {image_file.name}, got {len(labels)}",
        )
    if len(labels) and labels.max() >= CLASSES:
        raise bad_file_error(label_file, f"expected labels 0 to {CLASSES - 1}, got {labels.max()}")
    return images[:, None], labels.astype(np.int64), [str(image_file), str(label_file)]


def find_idx_file(name: str, file: str, root: Path | None) -> Path:
    """Returns this file of a dataset from any of its folders, compressed or not."""
    places = [f"{folder}/{file}{end}" for folder in FOLDERS[name] for end in (".gz", "")]
    return find_file(name, root, places)


def read_idx(path: Path, ndim: int) -> NDArray[np.uint8]:
    """Returns the uint8 array of an IDX file.

    The format is two zero bytes, the element type, the number of dimensions, their big-endian
    32-bit sizes, and the elements.
    """
    content = read_bytes(path)
    magic, header = bytes([0, 0, UNSIGNED_BYTE, ndim]), 4 + 4 * ndim
    if content[:4] != magic:
        raise bad_file_error(
            path,
            f"expected it to begin with {magic.hex()} (IDX), "
            f"got {content[:4].hex() or 'an empty file'}",
        )
    if len(content) < header:
        raise bad_file_error(path, f"expected a header of {header} bytes, got {len(content)}")
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", count=ndim, offset=4))
    expected = int(np.prod(shape, dtype=object))
    if len(content) - header != expected:
        sizes = "x".join(map(str, shape))
        raise bad_file_error(
            path,
            f"expected {expected} bytes after the header ({sizes}), got {len(content) - header}",
        )
    # Copy, because an array from `bytes` is read-only, and torch warns about read-only arrays.
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape).copy()
