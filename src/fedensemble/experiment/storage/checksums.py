"""SHA-256 checksums of the text files of a finished run, so that later changes are detected.

The checksums are not keyed. They detect damage and edits, but not forgery: anyone who can write the
files can write matching checksums.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from ...durable import write_json
from ...errors import StoreError
from .read_json import read_bytes, read_table

FILE = "checksums.json"
CHECKED = (
    "config.toml",
    "env.json",
    "metrics.jsonl",
    "clients.json",
    "predictions.json",
    "distillation.json",
    "summary.json",
)


def write_checksums(folder: Path, summary: bytes) -> None:
    """Writes the checksums of a run's files.

    Args:
        folder: of the run.
        summary: content of summary.json, which is written after the checksums.
    """
    checksums = {name: _checksum(folder / name) for name in CHECKED if (folder / name).is_file()}
    write_json(folder / FILE, checksums | {"summary.json": sha256(summary).hexdigest()})


def changed_files(folder: Path) -> list[str]:
    """Returns the files of a finished run that have changed; empty for runs without checksums.

    Deleted files are not listed: code that needs a missing file raises its own error.
    """
    if not (folder / FILE).is_file():
        return []
    try:
        checksums = read_table(folder / FILE)
    except StoreError:
        return [FILE]
    existing = [name for name in CHECKED if name in checksums and (folder / name).is_file()]
    return [name for name in existing if checksums[name] != _checksum(folder / name)]


def describe_changes(folder: Path, names: list[str]) -> str:
    """Returns a message about changed files, with what to do."""
    files = ", ".join(str(folder / name) for name in names)
    verb = "does not match its checksum" if len(names) == 1 else "do not match their checksums"
    return (
        f"{files} {verb}: changed or damaged after the run finished. "
        f"Restore the original, or delete {folder / FILE} to accept the change."
    )


def _checksum(path: Path) -> str:
    return sha256(read_bytes(path)).hexdigest()
