"""Reads image files as one array, by Pillow, the extra `images`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...arguments import need_memory, require_integer
from ...errors import DataError, InputError, first_line
from ..normalize import Standardise

SUFFIXES = frozenset(
    {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm"}
)
Color = Literal["auto", "gray", "rgb"]
Fit = Literal["stretch", "crop", "pad"]
GRAY = ("1", "L", "LA", "La")  # modes of Pillow without color
SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
ORIENTATION = 0x0112  # EXIF's tag: cameras store pictures as they were held


class Header(NamedTuple):
    """What an image file says of itself: (height, width) as it is shown, and Pillow's mode."""

    size: tuple[int, int]
    mode: str


def read_images(
    files: Sequence[Path],
    size: Sequence[int] | None = None,
    fit: Fit = "stretch",
    color: Color = "auto",
) -> NDArray[np.uint8]:
    """Returns the images, [n, channels, height, width].

    Args:
        files: paths.
        size: [height, width] to resize all images to, or [side] for squares; None if they have one
            size.
        fit: how an image of another shape is resized: its sides are stretched, its longer side is
            cropped, or its shorter side is padded with black.
        color: one channel, three, or one if no image has color.
    """
    pillow = import_pillow()
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # Pillow decodes without the GIL
        headers = list(pool.map(partial(_read_header, pillow), files))
        height, width = check_size(size) or _common_size(files, headers)
        gray = color == "gray" or (
            color == "auto" and all(is_gray(header.mode) for header in headers)
        )
        channels = 1 if gray else 3
        shape = (len(files), channels, height, width)
        need_memory("images", int(np.prod(shape)), f"{len(files)} images of {height}x{width}")
        pixels = np.empty(shape, np.uint8)
        read = partial(_read_one, pillow, size=(height, width), fit=fit, gray=gray)
        for index, picture in enumerate(pool.map(read, files)):
            pixels[index] = picture
    return pixels


def to_array(
    pillow: Any, image: Any, size: tuple[int, int] | None, fit: Fit, gray: bool
) -> NDArray[np.uint8]:
    """Returns the pixels of a Pillow image, uint8 [channels, height, width].

    Args:
        size: height and width; None for those of the image.
    """
    from PIL import ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode in SIXTEEN_BITS:  # convert() would clip them at 255
        image = pillow.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert(
            "RGBA"
        )  # Pillow warns if a palette with transparency loses it at once
    image = image.convert("L" if gray else "RGB")
    width, height = image.size if size is None else size[::-1]
    if image.size != (width, height):
        method = pillow.Resampling.BILINEAR
        if fit == "crop":
            image = ImageOps.fit(image, (width, height), method)
        elif fit == "pad":
            image = ImageOps.pad(image, (width, height), method)
        else:
            image = image.resize((width, height), method)
    values = np.asarray(image, np.uint8)
    return values[None] if gray else values.transpose(2, 0, 1)


def pixel_moments(pixels: NDArray[np.uint8]) -> Standardise:
    """Returns the normalization of images to mean 0 and standard deviation 1 per channel.

    Args:
        pixels: [n, channels, height, width].
    """
    # Counts of the 256 values are exact, and need no copy of all images in floating point.
    counts = np.zeros((pixels.shape[1], 256), np.int64)
    for start in range(0, len(pixels), 256):
        for channel in range(pixels.shape[1]):
            part = pixels[start : start + 256, channel]
            counts[channel] += np.bincount(part.ravel(), minlength=256)
    values = np.arange(256)
    total = counts.sum(1)
    mean = (counts * values).sum(1) / total
    variance = (counts * (values - mean[:, None]) ** 2).sum(1) / total
    std = np.where(variance > 0, np.sqrt(variance), 1.0)
    return Standardise(tuple(mean.tolist()), tuple(std.tolist()))


def different_sizes(sizes: Sequence[tuple[int, ...]], name: Callable[[int], str]) -> str:
    """Returns the message for images of different sizes.

    Args:
        sizes: height and width of each image.
        name: returns what to call an image, given its index.
    """
    (usual, count), *_ = Counter(sizes).most_common(1)
    other = next(row for row, size in enumerate(sizes) if size != usual)
    (h, w), (other_h, other_w) = usual, sizes[other]
    return (
        f"The images have {len(set(sizes))} different sizes (height x width): {count} of "
        f"{len(sizes)} are {h}x{w}, {name(other)} is {other_h}x{other_w}. Set size = [{h}, {w}] to "
        "resize all of them when they are read."
    )


def check_size(size: Sequence[int] | None) -> tuple[int, int] | None:
    """Returns height and width; one number stands for both."""
    if size is None:
        return None
    if not isinstance(size, (list, tuple)) or len(size) not in (1, 2):
        raise InputError(f"size must be [height, width], or [side] for squares; got size={size!r}.")
    sides = [require_integer("Reading images", "size", side, minimum=1) for side in size]
    return sides[0], sides[-1]


def is_gray(mode: str) -> bool:
    """Whether a mode of Pillow has no color."""
    return mode in (*GRAY, *SIXTEEN_BITS)


def import_pillow() -> Any:
    """Returns `PIL.Image`; raises if Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError:
        raise DataError(
            "Images are read by Pillow, which is not installed: run `pip install "
            "'fedensemble[images]'`."
        ) from None
    return Image


def _read_header(pillow: Any, file: Path) -> Header:
    """Returns the size and the mode of an image, without decoding it."""
    try:
        with pillow.open(file) as image:
            width, height = image.size
            turned = image.getexif().get(ORIENTATION, 1) >= 5
            mode = image.mode
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
        raise _unreadable(file, error) from None
    if mode in ("I", "F"):
        raise DataError(
            f"{file} has values of 32 bits, and images have 8 or 16. Convert it, or read the "
            "images yourself and give them as arrays (data.source = 'npz')."
        )
    return Header((width, height) if turned else (height, width), mode)


def _read_one(
    pillow: Any, file: Path, size: tuple[int, int], fit: Fit, gray: bool
) -> NDArray[np.uint8]:
    try:
        with pillow.open(file) as image:
            return to_array(pillow, image, size, fit, gray)
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
        raise _unreadable(file, error) from None


def _common_size(files: Sequence[Path], headers: Sequence[Header]) -> tuple[int, int]:
    """Returns the size of all images; raises if they differ."""
    sizes = [header.size for header in headers]
    if len(set(sizes)) > 1:
        raise DataError(different_sizes(sizes, lambda row: str(files[row])))
    return sizes[0]


def _unreadable(file: Path, error: Exception) -> DataError:
    return DataError(
        f"{file} cannot be read as an image: {first_line(error)}. Replace or remove the file."
    )
