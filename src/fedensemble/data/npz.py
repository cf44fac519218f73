"""Arrays of one's own, from a NumPy .npz file."""

from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, first_line
from .archive import check_member, largest_size
from .dataset import Rows, Source, data_folder, sources


@sources.register("npz")
def npz(
    *,
    path: Path | str,
    root: Path | None = None,
    x: str = "x",
    y: str = "y",
    x_test: str | None = None,
    y_test: str | None = None,
    client: str | None = None,
    x_server: str | None = None,
    classes: int | None = None,
) -> Source:
    """The arrays of a .npz file; x with type uint8 and three or more axes are images, other
    integers are tokens.

    Args:
        path: the file; if it is not there, it is looked for in the data folder.
        root: data folder.
        x, y: names of the arrays of training inputs and targets.
        x_test, y_test: names of the test arrays; by default those called x_test and y_test, if
            there are any.
        client: name of the array with the client of each training row (numbers or texts); by
            default the one called client, if there is one.
        x_server: name of the array of inputs that the server has; by default the one called
            x_server, if there is one.
        classes: number of classes; by default the largest label and one more.
    """
    file = find_npz(Path(path), root)
    wanted = {
        "x": x,
        "y": y,
        "x_test": x_test,
        "y_test": y_test,
        "client": client,
        "x_server": x_server,
    }
    arrays = read_arrays(file, wanted)
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise DataError(
            f"The file {file} has only one of the two test arrays; give x_test and y_test, or neither."
        )
    group, names = number_clients(file, arrays["client"]) if "client" in arrays else (None, None)
    return Source(
        arrays["x"],
        arrays["y"],
        arrays.get("x_test"),
        arrays.get("y_test"),
        classes=classes,
        group=group,
        group_names=names,
        info={"source": "npz", "files": [str(file)]},
        x_server=arrays.get("x_server"),
    )


def find_npz(path: Path, root: Path | None) -> Path:
    """The file at `path`, or below the data folder."""
    path = path.expanduser()
    places = [path] if path.is_absolute() else [path, data_folder(root) / path]
    for place in places:
        if "\0" not in str(place) and place.is_file():
            return place
    looked = ", ".join(str(place) for place in places)
    raise DataError(
        f"Dataset 'npz' needs the file {path.name}, which is missing. Looked for {looked}. "
        "Give its path, or set FEDENSEMBLE_DATA to the folder that has it; numpy.savez writes such files."
    )


def read_arrays(file: Path, wanted: dict[str, str | None]) -> dict[str, NDArray[Any]]:
    """The arrays asked for, by role; one whose name is None is left out if no array has its role's
    name.
    """
    arrays: dict[str, NDArray[Any]] = {}
    # by hand: numpy leaves a file open that turns out to be no archive
    with file.open("rb") as opened:
        archive, room = open_archive(file, opened), largest_size(file)
        for role, name in wanted.items():
            if name is None and role not in archive.files:
                continue
            name = name or role  # noqa: PLW2901
            if name not in archive.files:
                there = ", ".join(sorted(archive.files)) or "nothing"
                raise DataError(
                    f"The file {file} has no array '{name}' for {role}. It has {there}."
                )
            arrays[role] = read_array(file, archive, name, room)
            room -= arrays[role].nbytes  # the limit is for all of them together
    return arrays


def open_archive(file: Path, opened: BinaryIO) -> Any:
    """The archive in the opened file, from which arrays are read by name."""
    try:
        archive = np.load(opened, allow_pickle=False)
    except Exception:  # what the bytes of an unknown file make a reader raise
        raise no_archive(file, "it is no .npz file") from None
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise no_archive(file, "it is one array (.npy), not a .npz file with names")
    return archive


def read_array(file: Path, archive: Any, name: str, room: int | None = None) -> NDArray[Any]:
    """One array; raises for those that are no plain numbers or texts, and for those that are too
    large.

    Args:
        room: bytes it may take; by default what `largest_size` allows for the file.
    """
    try:
        dtype, count = check_member(
            archive.zip, name if name in archive.zip.namelist() else f"{name}.npy"
        )
        if dtype.hasobject:
            raise DataError(
                f"Array '{name}' in {file} is an object array, which would have to be unpickled, and that can run "
                "code. Save it as an array of numbers of one shape."
            )
        check_room(file, name, count * dtype.itemsize, largest_size(file) if room is None else room)
        array: NDArray[Any] = archive[name]
    except DataError:
        raise
    except MemoryError:
        raise DataError(
            f"There is not enough memory to read array '{name}' of {file}. Use fewer rows, a smaller type, or a "
            "machine with more memory."
        ) from None
    # damaged, encrypted or unknown compression: each has an exception of its own
    except Exception as error:
        raise no_archive(file, f"array '{name}' cannot be read ({first_line(error)})") from None
    if array.ndim == 0:
        raise DataError(f"Array '{name}' in {file} is a single value; it needs one row an example.")
    return array


def check_room(file: Path, name: str, size: int, room: int) -> None:
    """Raises if an array claims more bytes than it may take, before any of them is allocated."""
    if size > room:
        raise DataError(
            f"Array '{name}' of {file} unpacks to {size / 1e9:.3g} GB, more than the {room / 1e9:.3g} GB that are left "
            f"for a file of {file.stat().st_size / 1e9:.3g} GB. If you trust the file, set the environment variable "
            "FEDENSEMBLE_MAX_GB to the number of GB that may be read."
        )


def no_archive(file: Path, problem: str) -> DataError:
    """The error for a file of the user's that arrays cannot be read from."""
    return DataError(
        f"The file {file} is damaged or of another kind: {problem}. Give a file that numpy.savez wrote."
    )


def number_clients(file: Path, ids: NDArray[Any]) -> tuple[Rows, tuple[str, ...]]:
    """The number of each row's client, [n], in sorted order of the ids, and the ids as texts."""
    if ids.ndim != 1 or ids.dtype.kind not in "iuUS":
        raise DataError(
            f"Client ids in {file} must be whole numbers or texts, one a training row; "
            f"got {ids.dtype} of shape {ids.shape}."
        )
    names, group = np.unique(ids, return_inverse=True)
    return group.astype(np.int64), tuple(
        n.decode(errors="replace") if isinstance(n, bytes) else str(n) for n in names
    )
