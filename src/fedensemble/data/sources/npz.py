"""The user's own arrays from a NumPy .npz file."""

from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError, first_line
from ..dataset import Dataset, Rows, data_folder, datasets
from .archive import check_member, largest_size


@datasets.register("npz")
def npz(
    *,
    path: Path | str,
    root: Path | None = None,
    x: str = "x",
    y: str = "y",
    x_test: str | None = None,
    y_test: str | None = None,
    client: str | None = None,
    client_test: str | None = None,
    x_server: str | None = None,
    classes: int | None = None,
    class_names: list[str] | None = None,
) -> Dataset:
    """The arrays of an .npz file: uint8 x of three or more axes are images, other integers tokens.

    Labels may be integers, texts or booleans; texts are numbered in sorted order.

    Args:
        path: the file. If it does not exist, it is looked for in the data folder.
        root: data folder.
        x, y: names of the arrays of training inputs and targets.
        x_test, y_test: names of the test arrays; by default x_test and y_test, if they exist.
        client: name of the array with the client of each training row (integers or texts); by
            default client, if it exists.
        client_test: name of the array with the client of each test row; by default client_test, if
            it exists.
        x_server: name of the array of inputs for the server; by default x_server, if it exists.
        classes: number of classes; by default the largest label plus one.
        class_names: name of each class in the order of their numbers; by default the sorted labels,
            if they are texts.
    """
    file = find_npz(Path(path), root)
    names_by_role = {
        "x": x,
        "y": y,
        "x_test": x_test,
        "y_test": y_test,
        "client": client,
        "client_test": client_test,
        "x_server": x_server,
    }
    arrays = read_arrays(file, names_by_role)
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise DataError(
            f"The file {file} has only one of the two test arrays; give x_test and y_test, or "
            "neither."
        )
    group, names = number_clients(file, arrays["client"]) if "client" in arrays else (None, None)
    tests = arrays.get("client_test")
    return Dataset(
        arrays["x"],
        arrays["y"],
        arrays.get("x_test"),
        arrays.get("y_test"),
        classes=classes,
        class_names=None if class_names is None else tuple(class_names),
        group=group,
        group_names=names,
        test_group=None if tests is None else number_test_clients(file, tests, names),
        info={"source": "npz", "files": [str(file)]},
        x_server=arrays.get("x_server"),
    )


def find_npz(path: Path, root: Path | None) -> Path:
    """Returns the file at `path`, or at `path` relative to the data folder."""
    path = path.expanduser()
    places = [path] if path.is_absolute() else [path, data_folder(root) / path]
    for place in places:
        if "\0" not in str(place) and place.is_file():
            return place
    searched = ", ".join(str(place) for place in places)
    raise DataError(
        f"Dataset 'npz' needs the file {path.name}, which is missing. Looked for {searched}. "
        "Give its path, or set FEDENSEMBLE_DATA to the folder that has it; numpy.savez writes such "
        "files."
    )


def read_arrays(file: Path, names: dict[str, str | None]) -> dict[str, NDArray[Any]]:
    """Returns arrays of the file by role.

    Args:
        names: the name of the array of each role. None stands for an optional array that has the
            name of its role.
    """
    arrays: dict[str, NDArray[Any]] = {}
    # Open the file here, because numpy.load leaves a file open that is not an archive.
    with file.open("rb") as opened:
        archive, max_bytes = open_archive(file, opened), largest_size(file)
        for role, name in names.items():
            if name is None and role not in archive.files:
                continue
            name = name or role  # noqa: PLW2901
            if name not in archive.files:
                existing = ", ".join(sorted(archive.files)) or "nothing"
                raise DataError(
                    f"The file {file} has no array '{name}' for {role}. It has {existing}."
                )
            arrays[role] = read_array(file, archive, name, max_bytes)
            max_bytes -= arrays[role].nbytes  # the limit is for all arrays together
    return arrays


def open_archive(file: Path, opened: BinaryIO) -> Any:
    """Returns the archive in an open file; `read_array` reads its arrays by name."""
    try:
        archive = np.load(opened, allow_pickle=False)
    except Exception:  # an unknown file can make numpy raise almost any exception
        raise archive_error(file, "it is not an .npz file") from None
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise archive_error(file, "it is one array (.npy), not an .npz file with names")
    return archive


def read_array(file: Path, archive: Any, name: str, max_bytes: int | None = None) -> NDArray[Any]:
    """Returns one array; raises for object arrays, and for arrays that are too large.

    Args:
        max_bytes: largest size of the array; by default that of `largest_size` for the file.
    """
    try:
        dtype, count = check_member(
            archive.zip, name if name in archive.zip.namelist() else f"{name}.npy"
        )
        if dtype.hasobject:
            raise DataError(
                f"Array '{name}' in {file} is an object array, which would have to be unpickled, "
                "and that can run code. Save it as an array of numbers of one shape, or labels as "
                "texts, y.astype(str)."
            )
        limit = largest_size(file) if max_bytes is None else max_bytes
        check_array_size(file, name, count * dtype.itemsize, limit)
        array: NDArray[Any] = archive[name]
    except DataError:
        raise
    except MemoryError:
        raise DataError(
            f"There is not enough memory to read array '{name}' of {file}. Use fewer rows, a "
            "smaller type, or a machine with more memory."
        ) from None
    # Damaged, encrypted and unknown compressed data all raise different exceptions.
    except Exception as error:
        raise archive_error(file, f"array '{name}' cannot be read ({first_line(error)})") from None
    if array.ndim == 0:
        raise DataError(
            f"Array '{name}' in {file} is a single value; it needs one row per example."
        )
    return array


def check_array_size(file: Path, name: str, size: int, max_bytes: int) -> None:
    """Raises if an array needs more than `max_bytes`, before any memory is allocated."""
    if size > max_bytes:
        raise DataError(
            f"Array '{name}' of {file} unpacks to {size / 1e9:.3g} GB, more than the "
            f"{max_bytes / 1e9:.3g} GB that are left for a file of "
            f"{file.stat().st_size / 1e9:.3g} GB. If you trust the file, set the environment "
            "variable FEDENSEMBLE_MAX_GB to the number of GB that may be read."
        )


def archive_error(file: Path, problem: str) -> DataError:
    """Returns the error for a file of the user from which arrays cannot be read."""
    return DataError(
        f"The file {file} is damaged or of another kind: {problem}. Give a file that numpy.savez "
        "wrote."
    )


def number_clients(file: Path, ids: NDArray[Any]) -> tuple[Rows, tuple[str, ...]]:
    """Returns the index of the client of each row, [n], and the sorted client ids as texts."""
    if ids.ndim != 1 or ids.dtype.kind not in "iuUS":
        raise DataError(
            f"Client ids in {file} must be integers or texts, one per training row; "
            f"got {ids.dtype} of shape {ids.shape}."
        )
    names, group = np.unique(ids, return_inverse=True)
    return group.astype(np.int64), tuple(
        n.decode(errors="replace") if isinstance(n, bytes) else str(n) for n in names
    )


def number_test_clients(file: Path, ids: NDArray[Any], names: tuple[str, ...] | None) -> Rows:
    """Returns the index of the client of each test row, [n_test]; -1 for other clients.

    Args:
        ids: of the clients of the test rows.
        names: sorted ids of the clients of the training rows, or None without any.
    """
    if names is None:
        raise DataError(
            f"The file {file} has client ids for its test rows, but none for its training rows: "
            "give the array client, too."
        )
    number = {name: index for index, name in enumerate(names)}
    group, test_names = number_clients(file, ids)
    known = np.array([number.get(name, -1) for name in test_names], np.int64)
    return known[group]
