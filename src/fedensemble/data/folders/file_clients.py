"""Which client has which file: by a pattern of the file names, or by a table of two columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError, InputError
from ..dataset import Rows
from ..tables.columns import check_known
from ..tables.read import read_table

CLIENT = "{client}"
FILE_COLUMN, CLIENT_COLUMN = "file", "client"
_EXAMPLE = "such as '{client}_*' for ann_01.png and bob_01.png, or '*/{client}/*' for CLASS/ann/..."


def clients_by_pattern(names: Sequence[str], pattern: str, folder: Path) -> list[str]:
    """Returns the client of each file, from its name.

    `{client}` stands for the client, as few characters as possible; `*` for any text without a
    slash. A pattern with a slash is compared with the path below the folder, any other with the
    name alone.

    Args:
        names: paths of the files relative to the folder, with slashes.

    >>> clients_by_pattern(["cat/ann_1.png", "dog/bob_7_x.png"], "{client}_*", Path("pets"))
    ['ann', 'bob']
    >>> clients_by_pattern(["cat/ann/1.png"], "*/{client}/*", Path("pets"))
    ['ann']
    """
    if not isinstance(pattern, str) or pattern.count(CLIENT) != 1:
        raise InputError(
            f"client must be a pattern of file names with one {CLIENT}, {_EXAMPLE}; got "
            f"{pattern!r}."
        )
    regex = re.compile(
        re.escape(pattern).replace(re.escape(CLIENT), "(?P<client>[^/]+?)").replace(r"\*", "[^/]*")
    )
    whole = "/" in pattern
    matches = [regex.fullmatch(name if whole else name.rpartition("/")[2]) for name in names]
    failed = [name for name, match in zip(names, matches, strict=True) if match is None]
    if failed:
        raise DataError(
            f"{len(failed)} of {len(names)} files in {folder} do not match client = '{pattern}' "
            f"(the first is {failed[0]}). Change the pattern, {_EXAMPLE}, rename the files, or "
            "name the client of each file in a table: client_file = 'clients.csv'."
        )
    return [match["client"] for match in matches if match is not None]


def clients_by_table(names: Sequence[str], table: Path, folder: Path) -> list[str]:
    """Returns the client of each file, from a table with the columns file and client.

    Files have their path below the folder there, or their name alone if it is the only one.

    Args:
        names: paths of the files relative to the folder, with slashes.
    """
    rows = read_table(table, None, (), (FILE_COLUMN, CLIENT_COLUMN))
    check_known(table, (FILE_COLUMN, CLIENT_COLUMN), list(rows.columns))
    client_of: dict[str, str] = {}
    files, clients = rows.columns[FILE_COLUMN], rows.columns[CLIENT_COLUMN]
    assert files.codes is not None  # both columns were read as text
    assert clients.codes is not None
    for row, (file, client) in enumerate(zip(files.codes, clients.codes, strict=True)):
        if file < 0 or client < 0:
            raise DataError(
                f"{table} has no {FILE_COLUMN if file < 0 else CLIENT_COLUMN} in "
                f"{rows.place(row)}. Write both into each row."
            )
        name = files.texts[file].replace("\\", "/").removeprefix("./")
        known = client_of.setdefault(name, clients.texts[client])
        if known != clients.texts[client]:
            raise DataError(
                f"{table} gives {name} to the clients {known} and {clients.texts[client]} "
                f"({rows.place(row)}). Write each file once."
            )
    short = [name.rpartition("/")[2] for name in names]
    unique = _once(short)
    found = [
        client_of.get(name, client_of.get(last) if last in unique else None)
        for name, last in zip(names, short, strict=True)
    ]
    missing = [name for name, client in zip(names, found, strict=True) if client is None]
    if missing:
        raise DataError(
            f"{table} has no client for {len(missing)} of {len(names)} files in {folder} (the "
            f"first is {missing[0]}). Its column {FILE_COLUMN} has their paths below that folder."
        )
    return [client for client in found if client is not None]


def clients_of_files(
    names: Sequence[str], folder: Path, client: str | None, client_file: Path | str | None
) -> list[str] | None:
    """Returns the client of each file, by a pattern or a table; None without either."""
    if client is not None and client_file is not None:
        raise InputError("client and client_file both give the clients: set only one.")
    if client is not None:
        return clients_by_pattern(names, client, folder)
    if client_file is not None:
        return clients_by_table(names, find_client_file(client_file, folder), folder)
    return None


def split_clients(
    clients: Sequence[str] | None, is_test: NDArray[np.bool_]
) -> tuple[Rows | None, Rows | None, tuple[str, ...] | None]:
    """Returns the client of each training row, that of each test row or -1, and their names.

    Args:
        clients: of all rows; of test rows at the end it may be missing.
        is_test: which rows are test rows, [n].

    >>> split_clients(["10", "9", "8"], np.array([False, False, True, True]))
    (array([1, 0]), array([-1, -1]), ('9', '10'))
    """
    if clients is None:
        return None, None, None
    trained = {name for name, test in zip(clients, is_test, strict=False) if not test}
    numbers = all(name.isdecimal() for name in trained)
    names = sorted(trained, key=lambda name: (int(name) if numbers else 0, name))
    number = {name: index for index, name in enumerate(names)}
    padded = [number.get(name, -1) for name in clients] + [-1] * (len(is_test) - len(clients))
    rows = np.array(padded, np.int64)
    return rows[~is_test], rows[is_test], tuple(names)


def find_client_file(file: Path | str, folder: Path) -> Path:
    """Returns the table of clients: in the folder of the files, or where its path says."""
    path = Path(file).expanduser()
    places = [path] if path.is_absolute() else [folder / path, path]
    for place in places:
        if place.is_file():
            return place
    raise DataError(
        f"client_file {path.name} is missing. Looked for {', '.join(map(str, places))}. It is a "
        f"table with the columns {FILE_COLUMN} and {CLIENT_COLUMN}."
    )


def _once(names: Sequence[str]) -> set[str]:
    """Returns the names that occur once."""
    seen: set[str] = set()
    twice: set[str] = set()
    for name in names:
        (twice if name in seen else seen).add(name)
    return seen - twice
