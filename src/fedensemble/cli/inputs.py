"""Reads inputs for a run: arrays, or files of the kind that it was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ..data.folders.documents import SUFFIXES as TEXT_SUFFIXES
from ..data.folders.documents import read_text
from ..data.folders.encode_text import encode_bytes, hash_words
from ..data.folders.find_files import find_files
from ..data.folders.image_files import SUFFIXES as IMAGE_SUFFIXES
from ..data.folders.image_files import read_images
from ..data.sources.npz import open_archive, read_array
from ..data.sources.text import TABLES
from ..data.tables.columns import check_known
from ..data.tables.encode import category_columns, check_present, encode_new_inputs
from ..data.tables.read import read_table
from ..errors import DataError
from ..experiment.storage.ensemble_file import read_categories
from ..experiment.storage.run_folder import RunFolder
from ..predict import Ensemble

Inputs = tuple[NDArray[Any], list[str] | None]  # and the names of their files, if they have any


def read_inputs(path: Path) -> NDArray[Any]:
    """Returns the array `x` of an .npz file, or its only array; pickled arrays are rejected."""
    if not path.is_file():
        raise DataError(f"There is no file {path}.")
    with path.open("rb") as opened:
        archive = open_archive(path, opened)
        if "x" in archive.files:
            return read_array(path, archive, "x")
        if len(archive.files) == 1:
            return read_array(path, archive, archive.files[0])
        names = ", ".join(archive.files) or "none"
        raise DataError(f"{path} needs an array named x, or a single array; it has {names}.")


def read_new_inputs(path: Path, run: Path, ensemble: Ensemble) -> Inputs:
    """Returns inputs for a run, and the names of their files if each is a file.

    They are an .npz file, or what the run was trained on: a folder of images or an image, a table
    with the columns of inputs, or texts to classify.

    Args:
        path: file or folder.
        run: folder of the run.
        ensemble: of the run.
    """
    if not path.exists():
        raise DataError(f"There is no file {path}.")
    table = str(path).lower().endswith(TABLES)
    if path.is_file() and not table and path.suffix.lower() not in IMAGE_SUFFIXES | TEXT_SUFFIXES:
        return read_inputs(path), None
    data = RunFolder(run).read_config().get("data", {})
    source = data.get("source")
    if source == "images" and not table:
        return _images(path, data, ensemble)
    if source == "table" and table:
        return _rows(path, data, ensemble, read_categories(RunFolder(run).modes_file)), None
    if source == "text" and data.get("task") == "classify":
        texts, names = _column(path, data) if table else _texts(path)
        size = (ensemble.input_shape or (0,))[0]
        words = data.get("encoding", "words") == "words"
        return (hash_words(texts, size) if words else encode_bytes(texts, size)), names
    trained = "data from Python" if source is None else f"data.source = '{source}'"
    raise DataError(
        f"{run} was trained on {trained}, and takes an .npz file with an array x; got {path}. Runs "
        "on images, tables and documents also take those."
    )


def _images(path: Path, data: dict[str, Any], ensemble: Ensemble) -> Inputs:
    files, names = _files(path, IMAGE_SUFFIXES, "images")
    channels, *size = ensemble.input_shape or (3,)
    # Without data.size all images of training had one size, and others are a mistake.
    resized = size if data.get("size") is not None else None
    color = data.get("color", "auto")
    if color == "auto":
        color = "gray" if channels == 1 else "rgb"
    return read_images(files, resized, data.get("fit", "stretch"), color), names


def _rows(
    path: Path, data: dict[str, Any], ensemble: Ensemble, categories: Mapping[str, list[str]]
) -> NDArray[Any]:
    titles = ensemble.feature_names or ()
    text = {*category_columns(titles)} - {*titles} | {*categories}
    rows = read_table(path, data.get("delimiter"), (), text)
    return encode_new_inputs(rows, titles, categories)


def _column(path: Path, data: dict[str, Any]) -> tuple[list[str], None]:
    name = data["column"]
    rows = read_table(path, None, (), [name])
    check_known(path, [name], list(rows.columns))
    check_present(rows, {name: rows.columns[name].missing})
    texts, codes = rows.columns[name].sorted_texts()
    return [texts[code] for code in codes], None


def _texts(path: Path) -> tuple[list[str], list[str]]:
    files, names = _files(path, TEXT_SUFFIXES, "texts")
    return [read_text(file) for file in files], names


def _files(path: Path, suffixes: frozenset[str], what: str) -> tuple[list[Path], list[str]]:
    """Returns the files of a folder, also of its subfolders, and their names; or the one file."""
    if path.is_file():
        return [path], [path.name]
    names, _ = find_files(path, suffixes)
    if not names:
        raise DataError(f"{path} has no {what} ({', '.join(sorted(suffixes))}).")
    return [path / name for name in names], names
