"""Reads a table, whose file name says of which kind it is."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from ...errors import DataError
from .columns import Table
from .csv_file import read_csv
from .parquet_file import read_parquet


def read_table(
    file: Path, delimiter: str | None, drop: Collection[str], as_text: Collection[str]
) -> Table:
    """Returns the table of a file, whose name says of which kind it is."""
    if file.suffix.lower() in (".parquet", ".pq"):
        return read_parquet(file, drop, as_text)
    if file.name.lower().removesuffix(".gz").endswith((".csv", ".tsv", ".txt")):
        return read_csv(file, delimiter, drop, as_text)
    raise DataError(
        f"{file} must be a .csv, .tsv or .parquet file (.csv.gz works, too). Export the table as "
        "one of them."
    )
