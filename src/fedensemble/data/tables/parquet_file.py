"""Reads Parquet files by pyarrow, the extra `table`."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from ...arguments import need_memory
from ...errors import DataError, first_line
from .columns import MISSING, Column, Table, check_header, check_known


def read_parquet(file: Path, drop: Collection[str], as_text: Collection[str]) -> Table:
    """Returns the table of a Parquet file.

    Integers, floats and decimals are numbers; texts, categories and booleans are texts.

    Args:
        drop: names of columns that are not read.
        as_text: names of columns whose values are text even if they are numbers.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataError(
            f"{file} needs pyarrow to be read: pip install 'fedensemble[table]'; or write the "
            "table as a .csv file."
        ) from None
    try:
        with parquet.ParquetFile(file) as opened:
            header = list(opened.schema_arrow.names)
            names = [name for name in header if name not in drop]
            check_known(file, drop, header)
            check_header(file, header, names)
            # A few bytes can stand for a billion equal values.
            need_memory(str(file), 16 * opened.metadata.num_rows * len(names), "all of its columns")
            arrow = opened.read(columns=names)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(
            f"{file} is damaged or no Parquet file: {first_line(error)}. Write it again, as by "
            "to_parquet of pandas."
        ) from None
    if not len(arrow):
        raise DataError(f"{file} has no rows.")
    columns = {name: _column(file, name, arrow.column(name), name in as_text) for name in names}
    return Table(file, columns)


def _column(file: Path, name: str, values: Any, as_text: bool) -> Column:
    """Returns a column; raises if its type is neither a number nor a text."""
    import pyarrow as pa

    kind = values.type
    number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    if number and not as_text:
        floats = values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        return Column(np.asarray(floats, np.float64))
    if pa.types.is_dictionary(kind):
        values = values.cast(kind.value_type)
        kind = kind.value_type
    texts = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_boolean(kind)
    texts = texts or str(kind) == "string_view"
    if not texts and not number:
        raise DataError(
            f"Column '{name}' of {file} holds values of type {kind}, and inputs are numbers or "
            "text. Convert it, or leave it out by drop."
        )
    encoded = values.cast(pa.string()).combine_chunks().dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    found = [text.strip() for text in encoded.dictionary.to_pylist()]
    codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    # Texts that differ in spaces only become one, and those that stand for no value are missing.
    known = {text: code for code, text in enumerate(dict.fromkeys(found))}
    for text in known:
        if text.lower() in MISSING:
            known[text] = -1
    renumbered = np.array([*(known[text] for text in found), -1], np.int64)
    return Column(codes=renumbered[codes], texts=tuple(known))
