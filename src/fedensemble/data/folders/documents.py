"""Texts with classes and clients, from a folder or from a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError, InputError
from ..dataset import Rows
from ..sources.user_file import find_path
from ..tables.columns import check_known
from ..tables.encode import check_present, encode_classes
from ..tables.read import read_table
from .file_clients import clients_by_pattern, clients_of_files
from .find_files import find_labelled_files, note_ignored

SUFFIXES = frozenset({".txt", ".md"})


class Documents(NamedTuple):
    """Texts with their classes.

    Args:
        texts: the documents.
        label: index of the class of each, [n].
        class_names: of the classes.
        clients: the client of each, or None; it may be missing for test documents at the end.
        is_test: which are test documents, [n].
        notes: sentences for the user.
    """

    texts: list[str]
    label: Rows
    class_names: tuple[str, ...]
    clients: list[str] | None
    is_test: NDArray[np.bool_]
    notes: list[str]


def read_folder(
    path: Path | str,
    test_path: Path | str | None,
    root: Path | None,
    names: Sequence[str] | None,
    options: dict[str, Any],
) -> Documents:
    """Returns the texts of one subfolder per class."""
    for name in ("column", "target"):
        if options[name] is not None:
            raise InputError(f"{name} is for a table, and {path} is a folder: leave it out.")
    folder = find_path("text", path, root, folder=True)
    found = find_labelled_files(folder, SUFFIXES, "texts").ordered(names)
    clients = clients_of_files(found.names, folder, options["client"], options["client_file"])
    files, label, notes = found.paths, found.label, note_ignored(found.ignored, "texts")
    if test_path is not None:
        other = find_path("text", test_path, root, folder=True)
        test = find_labelled_files(other, SUFFIXES, "texts").as_test(found.classes)
        if clients is not None and options["client"] is not None:
            clients += clients_by_pattern(test.names, options["client"], test.folder)
        files, label = files + test.paths, np.concatenate([label, test.label])
        notes += note_ignored(test.ignored, "texts")
    texts = [read_text(file) for file in files]
    is_test = np.arange(len(texts)) >= len(found.names)
    return Documents(texts, label, found.classes, clients, is_test, notes)


def read_documents(
    path: Path | str,
    test_path: Path | str | None,
    root: Path | None,
    names: Sequence[str] | None,
    options: dict[str, Any],
) -> Documents:
    """Returns the texts of a column."""
    column, target, client = (options[name] for name in ("column", "target", "client"))
    for name, value in (("column", column), ("target", target)):
        if value is None:
            what = "texts" if name == "column" else "classes"
            raise InputError(f"{path} is a table: give {name}, the name of its column of {what}.")
    if options["client_file"] is not None:
        raise InputError(
            "client_file is for folders of files; in a table, client is the column with the client."
        )
    files = [find_path("text", path, root)]
    if test_path is not None:
        files.append(find_path("text", test_path, root))
    texts: list[str] = []
    label: list[Rows] = []
    clients: list[str] | None = None
    classes = names
    for is_test, file in enumerate(files):
        wanted = [column, target] + ([client] if client is not None else [])
        rows = read_table(file, None, (), wanted)
        needed = wanted if not is_test else [column, target]
        check_known(file, needed, list(rows.columns))
        check_present(rows, {name: rows.columns[name].missing for name in needed})
        values, codes = rows.columns[column].sorted_texts()
        texts += [values[code] for code in codes]
        numbers, classes = encode_classes(rows, target, classes)
        label.append(numbers)
        if client is not None and not is_test:
            values, codes = rows.columns[client].sorted_texts()
            clients = [values[code] for code in codes]
    assert classes is not None
    total = np.concatenate(label)
    is_test_row = np.arange(len(texts)) >= len(label[0])
    return Documents(texts, total, tuple(classes), clients, is_test_row, [])


def read_text(file: Path) -> str:
    """Returns the text of a file in UTF-8, with all line ends as newlines."""
    try:
        content = file.read_bytes()
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} is not text in UTF-8: byte {error.start} is {content[error.start]:#04x}. "
            "Convert it, as by `iconv -f latin1 -t utf-8`, or remove it."
        ) from None
