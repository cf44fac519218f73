"""The user's own texts: for next-character prediction, or for classification."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ...arguments import require_integer, require_one_of
from ...errors import DataError, InputError
from ..dataset import Dataset, Rows, datasets
from ..folders.documents import SUFFIXES, read_documents, read_folder, read_text
from ..folders.encode_text import (
    encode_bytes,
    encode_characters,
    find_vocabulary,
    hash_words,
)
from ..folders.file_clients import clients_of_files, split_clients
from ..folders.find_files import find_files, note_ignored
from ..labels.label_names import check_class_names
from ..splits.holdout import SEED, draw_holdout_mask, share_of_tests
from .shakespeare import VOCABULARY, cut_windows
from .user_file import find_path

Task = Literal["next", "classify"]
Encoding = Literal["words", "bytes"]
Vocabulary = Literal["data", "ascii"]
TABLES = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".parquet", ".pq")


@datasets.register("text")
def text(
    *,
    path: Path | str,
    task: Task = "next",
    client: str | None = None,
    client_file: Path | str | None = None,
    root: Path | None = None,
    sequence: int | None = None,
    vocabulary: Vocabulary = "data",
    most_characters: int = 256,
    column: str | None = None,
    target: str | None = None,
    encoding: Encoding = "words",
    features: int = 1024,
    class_names: list[str] | None = None,
    test_path: Path | str | None = None,
    test_share: float | None = None,
) -> Dataset:
    """Texts, to predict the next character or to classify documents.

    Args:
        path: for next: a text file in UTF-8, or a folder of them, of which each is a client. For
            classify: a folder with one subfolder of texts per class, or a .csv or .parquet table.
        task: next (x are characters and y the next ones, [n, sequence]) or classify.
        client: pattern of the file names that has the client, such as "{client}_*" for ann_01.txt;
            with slashes of the path below the folder, such as "*/{client}/*". In a table the name
            of the column with the client.
        client_file: a .csv or .parquet file with the columns file (path below the folder) and
            client, in place of a pattern.
        root: data folder.
        sequence: length of a window in characters, by default 80; for encoding bytes the length of
            a text, by default 256: the rest is cut off.
        vocabulary: for next: data (the characters of the training texts) or ascii (those of dataset
            shakespeare, the same for all texts).
        most_characters: of vocabulary data: the most frequent; all others are one token.
        column: of a table: the name of the column of texts.
        target: of a table: the name of the column of classes.
        encoding: for classify: words (hashed, float [n, features], for mlp) or bytes (of UTF-8 plus
            1, int64 [n, sequence], 0 is padding, for a sequence model of your own).
        features: columns of encoding words.
        class_names: the classes in the order of their numbers; by default sorted.
        test_path: for classify: a folder or table of test texts, arranged like path.
        test_share: share that is held out: for next the last part of each text, for classify
            documents of every class; by default 0.2, and 0 with test_path.
    """
    owner = "dataset 'text'"
    require_one_of(owner, "task", task, get_args(Task))
    require_one_of(owner, "encoding", encoding, get_args(Encoding))
    require_one_of(owner, "vocabulary", vocabulary, get_args(Vocabulary))
    require_integer(owner, "most_characters", most_characters, minimum=2)
    share = share_of_tests(owner, test_share, {"test_path": test_path})
    if sequence is not None:
        sequence = require_integer(owner, "sequence", sequence, minimum=1)
    if task == "next":
        others = {"column": column, "target": target, "test_path": test_path,
                  "class_names": class_names}  # fmt: skip
        for name, value in others.items():
            if value is not None:
                raise InputError(f"{name} is for classification: set task = 'classify', too.")
        most = most_characters if vocabulary == "data" else None
        return _next_characters(path, root, client, client_file, sequence or 80, share, most)
    read = read_documents if str(path).lower().endswith(TABLES) else read_folder
    names = None if class_names is None else check_class_names(class_names)
    options = {"client": client, "client_file": client_file, "column": column, "target": target}
    found = read(path, test_path, root, names, options)
    is_test = found.is_test
    if share:
        is_test = draw_holdout_mask(found.label, share, SEED)
    if is_test.all():
        raise DataError(f"All texts of {path} are test texts; training needs some.")
    x: NDArray[Any] = (
        hash_words(found.texts, features)
        if encoding == "words"
        else encode_bytes(found.texts, sequence or 256)
    )
    group, test_group, clients = split_clients(found.clients, is_test)
    tested = bool(is_test.any())
    return Dataset(
        x[~is_test],
        found.label[~is_test],
        x[is_test] if tested else None,
        found.label[is_test] if tested else None,
        class_names=found.class_names,
        group=group,
        group_names=clients,
        test_group=test_group if tested else None,
        info={"source": "text", "files": [str(path)], "texts": len(found.texts)},
        notes=tuple(found.notes),
    )


def _next_characters(
    path: Path | str,
    root: Path | None,
    client: str | None,
    client_file: Path | str | None,
    sequence: int,
    share: float,
    most: int | None,
) -> Dataset:
    """Returns windows of characters; a window never contains two files, or test text.

    Args:
        most: size of the vocabulary of the data; None for that of dataset shakespeare.
    """
    notes: list[str] = []
    clients: list[str] | None = None
    if Path(path).suffix:
        place = find_path("text", path, root)
        if str(path).lower().endswith(TABLES):
            raise DataError(
                f"{place} is a table. To classify its texts set task = 'classify', column and "
                "target; to predict the next character give a .txt file or a folder of them."
            )
        if client is not None or client_file is not None:
            raise InputError(
                f"client and client_file are for a folder of files, and {place} is one file. "
                "Leave them out; partition = 'contiguous' divides its text among clients."
            )
        files, names = [place], [place.name]
    else:
        place = find_path("text", path, root, folder=True)
        names, others = find_files(place, SUFFIXES)
        if not names:
            raise DataError(
                f"{place} has no files of text ({', '.join(sorted(SUFFIXES))}). Put some into it, "
                "or give the path of one file."
            )
        files = [place / name for name in names]
        clients = clients_of_files(names, place, client, client_file)
        if clients is None:
            clients = [name.rpartition(".")[0] for name in names]
        notes += note_ignored([name for name in others if name != str(client_file)], "texts")
    texts = [read_text(file) for file in files]
    cuts = [len(text) - round(share * len(text)) for text in texts]
    tokens = VOCABULARY if most is None else find_vocabulary(
        (text[:cut] for text, cut in zip(texts, cuts, strict=True)), most
    )  # fmt: skip
    parts: dict[bool, list[Rows]] = {False: [], True: []}
    owners: dict[bool, list[str]] = {False: [], True: []}
    short = []
    for index, (text, cut) in enumerate(zip(texts, cuts, strict=True)):
        numbers = encode_characters(text, tokens)
        train, test = cut_windows(numbers[:cut], sequence), cut_windows(numbers[cut:], sequence)
        if not len(train):
            short.append(names[index])
            continue
        for is_test, windows in ((False, train), (True, test)):
            parts[is_test].append(windows)
            owners[is_test] += [names[index] if clients is None else clients[index]] * len(windows)
    if not parts[False]:
        raise DataError(
            f"No text in {place} has {sequence + 1} characters for one window. Lower sequence."
        )
    if short:
        more = f" and {len(short) - 1} more" if len(short) > 1 else ""
        notes.append(
            f"Texts of less than {sequence + 1} characters are left out: {short[0]}{more}."
        )
    rows = np.concatenate(parts[False] + parts[True])
    is_test_row = np.arange(len(rows)) >= len(owners[False])
    group, test_group, group_names = split_clients(
        None if clients is None else owners[False] + owners[True], is_test_row
    )
    tested = bool(is_test_row.any())
    return Dataset(
        rows[~is_test_row, :-1],
        rows[~is_test_row, 1:],
        rows[is_test_row, :-1] if tested else None,
        rows[is_test_row, 1:] if tested else None,
        class_names=tuple(tokens),
        group=group,
        group_names=group_names,
        test_group=test_group if tested else None,
        info={"source": "text", "files": [str(place)], "texts": len(texts) - len(short)},
        notes=tuple(notes),
    )
