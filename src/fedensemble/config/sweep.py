"""Sweeps: `--set a.b=1,2,3` compares the values of a setting, several sweeps all combinations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

from ..errors import InputError
from ..text import shorten
from .toml import Values, check_given_once, merge, merge_tables, parse_setting

# A comparison with more rows is a mistake more often than a wish, and its table cannot be read.
MOST_ROWS = 1000

Rows = list[tuple[str, Values]]  # of a comparison: labels and the settings that each row overrides


class Sweep(NamedTuple):
    """A setting with the values to compare, as they were typed."""

    key: str
    values: tuple[str, ...]


def split_sweeps(settings: Sequence[str]) -> tuple[list[str], list[Sweep]]:
    """Returns the overrides "key=value" with one value, and the sweeps among the settings.

    >>> split_sweeps(["rounds=9", "algorithm.lr=0.1,0.3"])
    (['rounds=9'], [Sweep(key='algorithm.lr', values=('0.1', '0.3'))])
    """
    check_given_once(settings)
    single, sweeps = [], []
    for text in settings:
        key, _, value = text.partition("=")
        if key.strip() == "seed":
            raise InputError(
                f"--set {shorten(text)}: a comparison takes its seeds from --seeds, such as "
                "--seeds 0,1,2, or from `seeds` of its file."
            )
        parts = split_values(value)
        if len(parts) == 1:
            single.append(text)
            continue
        if not all(parts):
            raise InputError(
                f"--set {shorten(text)} has an empty value. Values to compare are separated by "
                "commas; a value that contains a comma needs quotes."
            )
        parsed = [parse_setting(f"{key}={part}") for part in parts]
        for at, values in enumerate(parsed):
            if values in parsed[:at]:
                first = parts[parsed.index(values)]
                raise InputError(
                    f"--set {shorten(text)} has a value twice: {shorten(first)} and "
                    f"{shorten(parts[at])}. Give it once."
                )
        sweeps.append(Sweep(key.strip(), tuple(parts)))
    return single, sweeps


def split_values(text: str, separator: str = ",") -> list[str]:
    """Returns the parts between separators; those in quotes, lists and tables do not separate.

    >>> split_values("0.1, 0.3"), split_values("[64,32],[16]"), split_values("'a,b',c")
    (['0.1', '0.3'], ['[64,32]', '[16]'], ["'a,b'", 'c'])
    >>> split_values("[64,32]"), split_values("it's,here")
    (['[64,32]'], ["it's,here"])
    """
    parts, start, depth, quote, escaped = [], 0, 0, "", False
    for at, character in enumerate(text):
        if quote:
            if character == quote and not escaped:
                quote = ""
            # A backslash escapes the next character in double quotes only, as in TOML.
            escaped = character == "\\" and quote == '"' and not escaped
        elif character in "\"'":
            quote = character
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        elif character == separator and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    # With a quote or bracket that is never closed, the text is one value: a string.
    return [text.strip()] if quote or depth else [*parts, text[start:].strip()]


def cross(factors: Sequence[Rows], sweeps: Sequence[Sweep], seeds: int) -> Rows:
    """Returns all combinations of rows, columns, ... and swept values, with joined labels.

    >>> rows = [("A", {"rounds": 9}), ("B", {})]
    >>> [label for label, _ in cross([rows], [Sweep("algorithm.lr", ("0.1", "0.3"))], seeds=3)]
    ['A, lr = 0.1', 'A, lr = 0.3', 'B, lr = 0.1', 'B, lr = 0.3']

    Args:
        factors: lists of rows. A later list overrides settings of an earlier one.
        sweeps: override settings of all factors.
        seeds: the number of runs per row, for the message if there are too many rows.

    Raises:
        InputError: the combinations are more than `MOST_ROWS`.
    """
    sizes = [*map(len, factors), *(len(sweep.values) for sweep in sweeps)]
    count = prod(sizes)  # before the combinations are made, which may be billions
    if count > MOST_ROWS:
        terms = " x ".join(f"{size:,}" for size in sizes if size > 1)
        total = f" = {count:,}" if " x " in terms else ""
        raise InputError(
            f"The comparison would have {terms}{total} rows, {count * seeds:,} runs with "
            f"{seeds} seed{'s' * (seeds > 1)} each; at most {MOST_ROWS:,} rows are possible. "
            "Compare fewer values, or split the comparison."
        )
    names = short_names([sweep.key for sweep in sweeps])
    swept = [_rows_of(sweep, name) for sweep, name in zip(sweeps, names, strict=True)]
    rows = []
    for combination in product(*factors, *swept):
        changes: Values = {}
        for _, values in combination[: len(factors)]:
            changes = merge(changes, values)
        # Sweeps are one layer: an option that a swept algorithm does not accept is an error, as in
        # one config, whatever the order of the sweeps.
        together: Values = {}
        for _, values in combination[len(factors) :]:
            together = merge_tables(together, values)
        label = ", ".join(label for label, _ in combination if label)
        rows.append((label, merge(changes, together)))
    return rows


def _rows_of(sweep: Sweep, name: str) -> Rows:
    """Returns one row per value of a sweep; text is shown without quotes, other values as typed."""
    rows = []
    for typed in sweep.values:
        setting = parse_setting(f"{sweep.key}={typed}")
        value: Any = setting
        for part in sweep.key.split("."):
            value = value[part]
        rows.append((f"{name} = {value if isinstance(value, str) else typed}", setting))
    return rows


def short_names(keys: Sequence[str]) -> list[str]:
    """Returns the last part of each key, or the whole key if two of them end in the same part.

    >>> short_names(["algorithm.lr", "algorithm.name"]), short_names(["model.lr", "algorithm.lr"])
    (['lr', 'algorithm'], ['model.lr', 'algorithm.lr'])
    """
    # `algorithm.name` is the algorithm, as `model.name` is the model.
    ends = [key.removesuffix(".name").rpartition(".")[2] for key in keys]
    return [end if ends.count(end) == 1 else key for end, key in zip(ends, keys, strict=True)]
