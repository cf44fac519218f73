"""Columns of Hugging Face datasets as arrays, by the interface that versions 4 and 5 share.

`datasets` is not imported: a dataset has `features`, `select_columns`, `with_format` and slices,
and features are told by the names of their classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError, unknown
from ..folders.image_files import Color, Fit, different_sizes, import_pillow, is_gray, to_array

ROWS = 1000  # that are decoded at a time
_NO_NUMBERS = ("Audio", "Video", "Pdf", "Translation", "TranslationVariableLanguages")


class ImageOptions(NamedTuple):
    """How images are read; the fields are those of dataset "images"."""

    size: tuple[int, int] | None = None
    fit: Fit = "stretch"
    color: Color = "auto"


def check_dataset(dataset: Any, what: str) -> None:
    """Raises unless this is a dataset whose rows can be counted and sliced."""
    features = getattr(dataset, "features", None)
    if hasattr(dataset, "select_columns") and not hasattr(dataset, "__len__"):
        raise DataError(
            f"{what} is streamed, so that its rows cannot be divided among clients. Load it without"
            " streaming=True, or take some: Dataset.from_list(list(dataset.take(10_000)))."
        )
    if not isinstance(features, Mapping) or not hasattr(dataset, "select_columns"):
        raise DataError(
            f"{what} must be a Dataset or a DatasetDict of Hugging Face's datasets; got "
            f"{type(dataset).__name__}. from_arrays and from_clients take arrays."
        )
    if not len(dataset):
        raise DataError(f"{what} has no rows.")


def feature_of(dataset: Any, name: str) -> Any:
    """Returns the feature of a column; raises if there is no such column."""
    if not isinstance(name, str) or name not in dataset.features:
        raise DataError(f"The dataset: {unknown('column', str(name), dataset.features)}")
    return dataset.features[name]


def read_inputs(
    parts: Sequence[Any], x: str | Sequence[str], options: ImageOptions
) -> tuple[list[NDArray[Any]], tuple[str, ...] | None]:
    """Returns the inputs of each part, [n, ...], and names of columns if there are several.

    Args:
        parts: datasets with the same columns.
        x: one column of images, arrays or tokens, or several columns of numbers.
    """
    if not isinstance(x, str):
        columns = [read_column(parts, name) for name in x]
        for name, column in zip(x, columns, strict=True):
            if any(part.ndim != 1 or part.dtype.kind not in "biuf" for part in column):
                raise DataError(
                    f"Several columns as x must hold one number per row each, and column '{name}' "
                    "does not. Give one column of arrays, or encode it by dataset.map()."
                )
        rows = zip(*columns, strict=True)
        return [np.stack(each, axis=1).astype(np.float32) for each in rows], tuple(x)
    kind = type(feature_of(parts[0], x)).__name__
    if kind == "Image" and not _transformed(parts[0]):
        return read_image_column(parts, x, options), None
    arrays = read_column(parts, x)
    if any(array.dtype.kind in "USO" for array in arrays):
        raise DataError(
            f"Column '{x}' holds text, and inputs are numbers. Encode it with one length for all "
            "rows, as by dataset.map(tokenize) with padding, or by fedensemble.data.hash_words."
        )
    if all(array.ndim == 1 for array in arrays):
        return [array[:, None].astype(np.float32) for array in arrays], (x,)
    return arrays, None


def read_column(parts: Sequence[Any], name: str) -> list[NDArray[Any]]:
    """Returns the values of a column in each part, [n, ...]; raises if their shapes differ."""
    kind = type(feature_of(parts[0], name)).__name__
    if kind in _NO_NUMBERS:
        raise DataError(
            f"Column '{name}' holds {kind}, which has no numbers of one shape. Compute features by "
            "dataset.map(), and name their column."
        )
    arrays = []
    for part in parts:
        feature_of(part, name)
        if _transformed(part):  # what the user's transform returns, as it is
            values = [value for rows in _slices(part, name) for value in rows]
        else:
            values = part.select_columns([name]).with_format("numpy")[:][name]
        try:
            arrays.append(_as_array(values))
        except ValueError:
            raise DataError(
                f"Column '{name}' holds arrays of different shapes. Give all rows one shape, as by "
                "dataset.map() with padding."
            ) from None
    return arrays


def read_image_column(
    parts: Sequence[Any], name: str, options: ImageOptions
) -> list[NDArray[np.uint8]]:
    """Returns the images of each part, uint8 [n, channels, height, width]."""
    pillow = import_pillow()
    all_pixels: list[list[NDArray[np.uint8]]] = []
    for part in parts:
        pixels: list[NDArray[np.uint8]] = []
        plain = part.with_format(None).select_columns([name])
        for rows in _slices(plain, name):
            for image in rows:
                if image is None:
                    raise DataError(
                        f"Column '{name}' has no image in row {len(pixels)}. Drop such rows by "
                        "dataset.filter()."
                    )
                gray = options.color == "gray" or (options.color == "auto" and is_gray(image.mode))
                pixels.append(to_array(pillow, image, options.size, options.fit, gray))
        all_pixels.append(pixels)
    shapes = [image.shape for pixels in all_pixels for image in pixels]
    if len({shape[1:] for shape in shapes}) > 1:
        raise DataError(different_sizes([s[1:] for s in shapes], lambda row: f"that of row {row}"))
    channels = max(shape[0] for shape in shapes)  # gray images among colored ones get three
    return [
        np.stack([np.broadcast_to(image, (channels, *image.shape[1:])) for image in pixels])
        for pixels in all_pixels
    ]


def _as_array(values: Any) -> NDArray[Any]:
    """Returns the values of all rows, [n, ...]; raises ValueError if their shapes differ."""
    if isinstance(values, np.ndarray) and values.dtype.kind != "O":
        return values
    if any(np.ndim(value) for value in values):
        return np.stack([np.asarray(value) for value in values])
    missing = any(value is None for value in values)
    return np.array(list(values), object if missing else None)


def _slices(dataset: Any, name: str) -> Iterator[Any]:
    for start in range(0, len(dataset), ROWS):
        yield dataset[start : start + ROWS][name]


def _transformed(dataset: Any) -> bool:
    """Whether the dataset has a transform of the user, as by with_transform()."""
    form = getattr(dataset, "format", None)
    return isinstance(form, Mapping) and form.get("type") == "custom"
