"""Shakespeare for next-character prediction, with the roles of the plays as natural clients.

Without roles, the dataset is one long text. Token 0 is any character outside the vocabulary, 1 is
the newline, and 2 to 96 are the printable ASCII characters from space to tilde. The vocabulary is
fixed, so that a model can be used on different texts.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from ...arguments import require_fraction, require_integer, require_one_of
from ...errors import DataError
from ..dataset import Dataset, Rows, bad_file_error, data_folder, datasets, find_file, read_bytes

VOCABULARY = "\N{REPLACEMENT CHARACTER}\n" + "".join(chr(code) for code in range(32, 127))
ROLES = "shakespeare/works.jsonl"
TEXTS = ("shakespeare/shakespeare.txt", "shakespeare/input.txt")
HOW_TO_GET_ROLES = (
    "It has one JSON record per line with kind, play, speaker and lines; put it there by hand, set "
    "FEDENSEMBLE_DATA to the folder that has it, or use form='text', whose file `fedensemble data "
    "get shakespeare` gets."
)


@datasets.register("shakespeare")
def shakespeare(
    *,
    root: Path | None = None,
    form: str = "auto",
    sequence: int = 80,
    min_lines: int = 3,
    test_fraction: float = 0.2,
) -> Dataset:
    """Shakespeare: x are tokens, int64 [n, sequence], and y the next tokens, [n, sequence].

    The last part of each role's text (or of the whole text) is the test set. Windows do not overlap
    in inputs or targets. A window never contains both training and test text, or two roles.

    Args:
        root: data folder, with the files in its subfolder shakespeare: works.jsonl, or
            shakespeare.txt or input.txt.
        form: "roles" for natural clients, "text" for one text without clients, "auto" for roles if
            their file exists.
        sequence: length of a window, in characters; 80 as in LEAF.
        min_lines: roles with fewer lines are dropped; 3 as in LEAF.
        test_fraction: fraction of the characters that is held out.
    """
    owner = "dataset 'shakespeare'"
    sequence = require_integer(owner, "sequence", sequence, minimum=1)
    min_lines = require_integer(owner, "min_lines", min_lines)
    test_fraction = require_fraction(owner, "test_fraction", test_fraction)
    if require_one_of(owner, "form", form, ("auto", "roles", "text")) == "auto":
        form = "roles" if (data_folder(root) / ROLES).is_file() else "text"
    if form == "text":
        path = find_file("shakespeare", root, TEXTS)
        return from_texts({"": decode_text(path)}, path, sequence, test_fraction, {"form": "text"})
    path = find_file("shakespeare", root, [ROLES], HOW_TO_GET_ROLES)
    roles = read_roles(path)
    texts = {
        name: "\n".join(lines) + "\n" for name, lines in roles.items() if len(lines) >= min_lines
    }
    counts = {"form": "roles", "roles": len(roles), "dropped_few_lines": len(roles) - len(texts)}
    return from_texts(texts, path, sequence, test_fraction, counts)


def from_texts(
    texts: dict[str, str], path: Path, sequence: int, test_fraction: float, info: dict[str, Any]
) -> Dataset:
    """Returns the dataset of these texts, without those too short for one training window."""
    train, test, names = [], [], []
    for name, text in texts.items():
        tokens = encode(text)
        cut = len(tokens) - round(test_fraction * len(tokens))
        windows = cut_windows(tokens[:cut], sequence)
        if len(windows):
            names.append(name)
            train.append(windows)
            test.append(cut_windows(tokens[cut:], sequence))
    if not names:
        raise DataError(
            f"No text in {path} is long enough for one window of {sequence} characters. "
            "Lower sequence."
        )
    rows, held_out = np.concatenate(train), np.concatenate(test)
    info = {
        "source": "shakespeare",
        "files": [str(path)],
        **info,
        "dropped_short": len(texts) - len(names),
    }
    natural = info["form"] == "roles"
    tests = np.repeat(np.arange(len(names)), [len(windows) for windows in test])
    return Dataset(
        rows[:, :-1],
        rows[:, 1:],
        held_out[:, :-1] if len(held_out) else None,
        held_out[:, 1:] if len(held_out) else None,
        classes=len(VOCABULARY),
        group=np.repeat(np.arange(len(names)), [len(windows) for windows in train])
        if natural
        else None,
        group_names=tuple(names) if natural else None,
        test_group=tests if natural and len(held_out) else None,
        info=info,
    )


def cut_windows(tokens: Rows, sequence: int) -> Rows:
    """Returns windows of `sequence` + 1 tokens, [n, sequence + 1].

    The last token of a window is only a target. It is the first input of the next window.

    >>> cut_windows(np.arange(8), 3).tolist()
    [[0, 1, 2, 3], [3, 4, 5, 6]]
    """
    count = max(0, (len(tokens) - 1) // sequence)
    starts = sequence * np.arange(count)
    windows: Rows = tokens[starts[:, None] + np.arange(sequence + 1)]
    return windows


def encode(text: str) -> Rows:
    r"""Returns the tokens of a text, [length].

    >>> encode("\n ~é").tolist()
    [1, 2, 96, 0]
    """
    codes = np.frombuffer(text.encode("utf-32-le", errors="replace"), "<u4").astype(np.int64)
    printable = np.where((codes >= 32) & (codes < 127), codes - 30, 0)
    return np.where(codes == ord("\n"), 1, printable)


def decode(tokens: Any) -> str:
    """Returns the text of the tokens.

    >>> decode(encode("To be"))
    'To be'
    """
    return "".join(VOCABULARY[int(token)] for token in tokens)


def read_roles(path: Path) -> dict[str, list[str]]:
    """Returns the lines of each role by "play: speaker", in the order of first appearance."""
    roles: dict[str, list[str]] = {}
    for number, line in enumerate(decode_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if record.get("kind", "speech") != "speech":
                continue
            name, lines = f"{record['play']}: {record['speaker']}", record["lines"]
        except (ValueError, AttributeError, KeyError) as error:
            raise bad_file_error(
                path, f"line {number} is not a record with play, speaker and lines ({error!r})"
            ) from None
        if not isinstance(lines, list) or not all(isinstance(text, str) for text in lines):
            raise bad_file_error(
                path, f"the lines of the record in line {number} must be a list of texts"
            )
        roles.setdefault(name, []).extend(lines)
    return roles


def decode_text(path: Path) -> str:
    """Returns the text of a UTF-8 file, with all line ends converted to newlines."""
    try:
        return read_bytes(path).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise bad_file_error(path, f"it is not UTF-8 text ({error})") from None
