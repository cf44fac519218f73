"""SHA-256 of the text files of a finished run, so that a change is noticed.

The checksums have no key: they show damage and edits, not forgery. Whoever can write the files can
write checksums.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from ..durable import write_json
from ..errors import StoreError
from .read_json import read_bytes, read_table

FILE = "checksums.json"
CHECKED = (
    "config.toml",
    "env.json",
    "metrics.jsonl",
    "clients.json",
    "predictions.json",
    "summary.json",
)


def write_checksums(folder: Path, summary: bytes) -> None:
    """Writes the checksums of a run's files and of the summary, which is written after them."""
    found = {name: _checksum(folder / name) for name in CHECKED if (folder / name).is_file()}
    write_json(folder / FILE, found | {"summary.json": sha256(summary).hexdigest()})


def changed_files(folder: Path) -> list[str]:
    """Files of a finished run that are not as they were written; none for runs without checksums.

    A file that was deleted is not listed: whoever needs it says that it is missing.
    """
    if not (folder / FILE).is_file():
        return []
    try:
        known = read_table(folder / FILE)
    except StoreError:
        return [FILE]
    there = [name for name in CHECKED if name in known and (folder / name).is_file()]
    return [name for name in there if known[name] != _checksum(folder / name)]


def describe_changes(folder: Path, names: list[str]) -> str:
    """A sentence for files that have changed."""
    verb = "does not match its checksum" if len(names) == 1 else "do not match their checksums"
    return (
        f"{', '.join(str(folder / name) for name in names)} {verb}: changed or damaged since the run was finished. "
        f"Restore the original, or delete {folder / FILE} to accept the change."
    )


def _checksum(path: Path) -> str:
    return sha256(read_bytes(path)).hexdigest()
