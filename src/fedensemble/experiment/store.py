"""A run's folder: config, environment, metrics, checkpoints, modes; `summary.json` is written last and means done."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from torch import Tensor

from ..checkpoint import check_start, read_checkpoint, write_bytes, write_checkpoint, write_json
from ..errors import DivergedError, InputError, StoreError
from .config import NOT_HASHED, Config

KEPT = 2  # checkpoints: should the newest be damaged, the one before it is still good

Say = Callable[[str], None]


class RunFolder:
    """One run on disk; only one process at a time may train in it.

    Args:
        path: the folder; made when the run is claimed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file, self.metrics_file = path / "config.toml", path / "metrics.jsonl"
        self.modes_file, self.summary_file = path / "modes.safetensors", path / "summary.json"
        self.diverged_file = path / "diverged.json"
        self.clients_file, self.predictions_file = path / "clients.json", path / "predictions.json"
        self._lock = FileLock(str(path / ".lock"))

    def claim(self, config: Config) -> None:
        """Takes the folder for a config, alone; raises if it belongs to another config or process."""
        self._refuse_strangers(config)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
        except Timeout:
            raise StoreError(
                f"Another process trains in {self.path}; wait for it, or use another folder (--out or --runs)."
            ) from None
        except OSError as error:
            raise StoreError(
                f"Cannot write to {self.path}: {error.strerror or error}. Choose another --out or --runs."
            ) from None
        if not self.config_file.exists():
            write_bytes(self.config_file, config.toml().encode())

    def release(self) -> None:
        """Lets others in."""
        self._lock.release()

    def _refuse_strangers(self, config: Config) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise StoreError(f"{self.path} is a file; a run needs a folder. Choose another --out or --runs.")
        if not self.config_file.exists():
            if self.path.is_dir() and any(p.name != ".lock" for p in self.path.iterdir()):
                raise StoreError(f"{self.path} holds other files and no run of ours. Choose another --out or --runs.")
            return
        theirs = self.read_config()
        ours = tomllib.loads(config.toml())
        keys = ", ".join(sorted(_differences(theirs, ours))[:5])
        if keys:
            raise StoreError(
                f"{self.path} belongs to a run with other settings ({keys}). Choose another --out or --runs."
            )

    def read_config(self) -> dict[str, Any]:
        """The settings the folder was made with."""
        try:
            return tomllib.loads(self.config_file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InputError(f"{self.path} is not a run: it has no config.toml.") from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise StoreError(f"{self.config_file} cannot be read: {error}.") from None

    @property
    def done(self) -> bool:
        """Whether the run is finished."""
        return self.summary_file.exists()

    @property
    def state(self) -> str:
        """How far the run is, in a word."""
        return "done" if self.done else "diverged" if self.diverged_file.exists() else "unfinished"

    def summary(self) -> dict[str, Any]:
        """The summary of a finished run."""
        if not self.done:
            raise InputError(f"The run in {self.path} is not finished; run its command again to go on.")
        try:
            found = read_json(self.summary_file)
        except StoreError as error:
            raise StoreError(f"{error} {self._again()}") from None
        if not isinstance(found, dict):
            raise StoreError(f"{self.summary_file} is damaged: it holds no table. {self._again()}")
        return found

    def check_modes(self) -> None:
        """Raises if the file of the modes is damaged, as far as its beginning and its length show."""
        try:
            check_start(self.modes_file)
        except StoreError as error:
            raise self.modes_lost(error) from None

    def modes_lost(self, error: StoreError) -> StoreError:
        """The error for modes that cannot be read, with what to do."""
        return StoreError(f"{error} {self._again()}")

    def _again(self) -> str:
        return f"Delete {self.summary_file} and start the run's command again: it goes on from the last checkpoint."

    def metrics(self) -> list[dict[str, Any]]:
        """One record a round, as far as they are whole."""
        if not self.metrics_file.exists():
            return []
        lines = self.metrics_file.read_bytes().split(b"\n")[:-1]  # what follows the last newline was cut short
        try:
            return [json.loads(line) for line in lines]
        except ValueError:
            raise StoreError(f"{self.metrics_file} is damaged.") from None

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Adds a round's record."""
        try:
            with open(self.metrics_file, "ab") as file:
                file.write((json.dumps(record) + "\n").encode())
        except OSError as error:
            raise StoreError(f"Cannot write {self.metrics_file}: {error.strerror or error}.") from None

    def save(self, tensors: Mapping[str, Tensor], round: int, facts: Mapping[str, Any]) -> None:
        """Writes a checkpoint that goes with the metrics so far, and drops all but the last ones."""
        metrics = self.metrics_file.read_bytes() if self.metrics_file.exists() else b""
        held = {"round": round, "metrics_bytes": len(metrics), "metrics_sha256": sha256(metrics).hexdigest()}
        write_checkpoint(self._checkpoint(round), tensors, {**facts, **held})
        for old in self._checkpoints()[KEPT:]:
            old.unlink(missing_ok=True)

    def resume(self, facts: Mapping[str, Any], say: Say) -> tuple[dict[str, Tensor], int] | None:
        """Tensors and round of the newest checkpoint that is whole, with the metrics cut back to it; or None.

        Args:
            facts: must be what the checkpoint was saved with (the data's fingerprint).
        """
        saved = self._checkpoints()
        for path in saved:
            last = path == saved[-1]
            back = "There is none before it: starting again from round 0." if last else "Going back to the one before."
            try:
                tensors, held = read_checkpoint(path)
            except StoreError as error:
                say(f"{error} {back}")
                continue
            changed = [key for key, value in facts.items() if held.get(key) != value]
            if changed:
                raise StoreError(
                    f"{self.path} was trained on other data; they have changed since. "
                    "Choose another --out or --runs, or delete the folder."
                )
            metrics = self.metrics_file.read_bytes() if self.metrics_file.exists() else b""
            kept = metrics[: held["metrics_bytes"]]
            if sha256(kept).hexdigest() != held["metrics_sha256"]:
                say(f"{self.metrics_file} does not fit {path.name}. {back}")
                continue
            if kept != metrics:
                write_bytes(self.metrics_file, kept)
            return tensors, int(held["round"])
        if self.metrics_file.exists():
            write_bytes(self.metrics_file, b"")
        return None

    def kept(self) -> str:
        """What there is to go on from, in a sentence."""
        saved = self._checkpoints()
        if not saved:
            return "There is no checkpoint yet; start the same command again."
        last = int(saved[0].stem.removeprefix("round-"))
        return f"The checkpoint of round {last} in {self.path} is intact; start the same command again to go on."

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Marks the run as done."""
        write_json(self.summary_file, summary)

    def diverge(self, error: DivergedError) -> None:
        """Notes why the run cannot go on, until it is tried again."""
        write_json(self.diverged_file, {"error": str(error)})

    def _checkpoint(self, round: int) -> Path:
        return self.path / "checkpoint" / f"round-{round:08d}.safetensors"

    def _checkpoints(self) -> list[Path]:
        """Checkpoints, newest first; half-written leftovers are not among them."""
        return sorted((self.path / "checkpoint").glob("round-*.safetensors"), reverse=True)


def read_json(path: Path) -> dict[str, Any]:
    """What a JSON file holds."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} cannot be read: {error}.") from None


def find_runs(root: Path) -> list[RunFolder]:
    """All runs below a folder."""
    return [RunFolder(path.parent) for path in sorted(root.glob("**/config.toml"))]


def _differences(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Keys whose values differ, dotted."""
    found = []
    for key in {*a, *b}:
        ours, theirs = a.get(key), b.get(key)
        if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
            found += _differences(ours, theirs, f"{prefix}{key}.")
        elif ours != theirs and f"{prefix}{key}" not in NOT_HASHED:
            found.append(f"{prefix}{key}")
    return found
