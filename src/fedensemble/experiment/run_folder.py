"""A run's folder: config, environment, metrics, checkpoints, modes; `summary.json` is written last
and means done.

What a run leaves on disk at any moment is enough to continue it to the same bytes. A checkpoint
holds the tensors and the records of all rounds before it; it is synced, and so is its name, before
the one before the last is deleted.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from .. import durable
from ..checkpoint import check_start, read_checkpoint, write_checkpoint
from ..config.schema import NOT_HASHED, Config
from ..errors import DivergedError, InputError, StoreError
from .checksums import changed_files, describe_changes, write_checksums
from .folder_lock import LOCK, Claim
from .metrics_log import MetricsLog, unpack
from .read_json import need_keys, need_numbers, read_bytes, read_json, read_table

__all__ = ["KEPT", "RunFolder", "Say", "find_runs", "read_json"]

KEPT = 2  # checkpoints: should the newest be damaged, the one before it is still good
_METRICS = "metrics"  # the tensor of a checkpoint that holds the records of the rounds before it
# keys that every version has written to config.toml: one that lacks them was cut short
_WRITTEN = (
    "name",
    "seed",
    "rounds",
    "data.source",
    "model.name",
    "algorithm.name",
    "ensemble.modes",
    "ensemble.schedule",
    "training.loss",
    "evaluation.every",
    "engine.name",
    "engine.device",
    "engine.dtype",
)

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
        self._claim, self._log = Claim(path), MetricsLog(self.metrics_file)

    def claim(self, config: Config) -> None:
        """Takes the folder for a config, alone; raises if it belongs to another config or
        process.
        """
        self._refuse_strangers(config)
        self._claim.take()
        try:
            if not self.config_file.exists():
                self.write(self.config_file, config.toml().encode())
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Lets others in."""
        self._claim.release()

    def check_claim(self) -> None:
        """Raises if the folder is no longer the one that was claimed; every write must be preceded
        by it.
        """
        self._claim.check()

    def write(self, file: Path, content: bytes) -> None:
        """Writes a file of the claimed folder."""
        self.check_claim()
        durable.write_bytes(file, content)

    def _refuse_strangers(self, config: Config) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise StoreError(
                f"{self.path} is a file; a run needs a folder. Choose another --out or --runs."
            )
        if not self.config_file.exists():
            if self.path.is_dir() and any(
                name != LOCK and not durable.is_leftover(name) for name in self._names()
            ):
                raise StoreError(
                    f"{self.path} holds other files and no run of ours. Choose another --out or --runs."
                )
            return
        theirs = self.read_config()
        ours = tomllib.loads(config.toml())
        keys = ", ".join(sorted(_differences(theirs, ours))[:5])
        if keys:
            raise StoreError(
                f"{self.path} belongs to a run with other settings ({keys}). Choose another --out or --runs."
            )

    def _names(self) -> list[str]:
        try:
            return [entry.name for entry in self.path.iterdir()]
        except OSError as error:
            raise StoreError(f"{self.path} cannot be read: {durable.reason(error)}") from None

    def read_config(self) -> dict[str, Any]:
        """The settings the folder was made with."""
        if not self.config_file.exists():
            raise InputError(f"{self.path} is not a run: it has no config.toml.")
        try:
            values = tomllib.loads(read_bytes(self.config_file).decode("utf-8"))
        except RecursionError:
            raise StoreError(f"{self.config_file} cannot be read: it is nested too deep.") from None
        except ValueError as error:  # not UTF-8, or not TOML
            raise StoreError(f"{self.config_file} cannot be read: {error}.") from None
        need_keys(self.config_file, values, _WRITTEN)
        return values

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
            raise InputError(
                f"The run in {self.path} is not finished; run its command again to go on."
            )
        try:
            found = read_table(self.summary_file)
            need_keys(self.summary_file, found, ("name",))
            need_numbers(self.summary_file, found, ("rounds", "modes", "bytes_up", "bytes_down"))
        except StoreError as error:
            raise StoreError(f"{error} {self._again()}") from None
        return found

    def changes(self) -> str:
        """What has changed in the files of a finished run since it was finished, as a sentence;
        empty if nothing.
        """
        names = changed_files(self.path) if self.done else []
        return describe_changes(self.path, names) if names else ""

    def refuse_changes(self, *names: str) -> None:
        """Raises if one of these files has changed since the run was finished."""
        if changed := [name for name in changed_files(self.path) if name in names]:
            raise StoreError(describe_changes(self.path, changed))

    def check_modes(self) -> None:
        """Raises if the file of the modes is damaged, as far as its beginning and its length
        show.
        """
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
        """One record per round, as far as they are complete."""
        return self._log.records()

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Adds a round's record."""
        self.check_claim()
        self._log.append(record)

    def save(self, tensors: Mapping[str, Tensor], round: int, facts: Mapping[str, Any]) -> None:
        """Writes a checkpoint with the metrics so far, and drops all but the last ones.

        Checkpoints hold what clients keep between visits: only this user may read them.
        """
        self.check_claim()
        self._log.sync()
        held = {**tensors, _METRICS: self._log.packed()}
        write_checkpoint(
            self._checkpoint(round),
            held,
            {**facts, "round": round, **self._log.facts()},
            private=True,
        )
        # it may be there from before checkpoints were private
        durable.make_private(self._checkpoint(round).parent)
        durable.remove(*self._checkpoints()[KEPT:])

    def resume(self, facts: Mapping[str, Any], say: Say) -> tuple[dict[str, Tensor], int] | None:
        """Tensors and round of the newest checkpoint that is whole, with the metrics cut back to
        it; or None.

        Args:
            facts: must be what the checkpoint was saved with (the data's fingerprint).
        """
        self.check_claim()
        saved = self._checkpoints()
        for path in saved:
            last = path == saved[-1]
            back = (
                "There is none before it: starting again from round 0."
                if last
                else "Going back to the one before."
            )
            try:
                tensors, held = read_checkpoint(path)
                need_numbers(path, held, ("round", "metrics_bytes"), "its description")
            except StoreError as error:
                say(f"{error} {back}")
                continue
            changed = [key for key, value in facts.items() if held.get(key) != value]
            if changed:
                raise StoreError(
                    f"{self.path} was trained on other data; they have changed since. "
                    "Choose another --out or --runs, or delete the folder."
                )
            self._restore_metrics(path, tensors.pop(_METRICS, None), held, say)
            # a kill may have come between a checkpoint and the removal of the last but one
            if path == saved[0]:
                durable.remove(*saved[KEPT:])
            return tensors, int(held["round"])
        self._log.restore(b"")
        return None

    def _restore_metrics(
        self, path: Path, packed: Tensor | None, held: Mapping[str, Any], say: Say
    ) -> None:
        """Gives metrics.jsonl the records up to a checkpoint: those it holds or, if it is older,
        those that are there.

        A checkpoint whose tensors are good is never given up because of metrics.
        """
        round, size = int(held["round"]), int(held["metrics_bytes"])
        content = None if packed is None else unpack(packed, size)
        if content is not None:
            if not self._log.restore(content):
                say(
                    f"{self.metrics_file} did not match {path.name}; its records were restored from there."
                )
            return
        content = self._log.salvage(round)
        self._log.restore(content)
        missing = round - content.count(b"\n")
        if missing or self._log.facts()["metrics_sha256"] != held.get("metrics_sha256"):
            lost = (
                f" The records of its last {missing} rounds are lost, and totals are without them."
                * bool(missing)
            )
            say(
                f"{self.metrics_file} does not match {path.name}; training goes on from there.{lost}"
            )

    def kept(self) -> str:
        """What there is to go on from, in a sentence."""
        saved = self._checkpoints()
        if not saved:
            return "There is no checkpoint yet; start the same command again."
        last = int(saved[0].stem.removeprefix("round-"))
        return f"The checkpoint of round {last} in {self.path} is intact; start the same command again to go on."

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Marks the run as done: everything else is durable before the summary is there."""
        self.check_claim()
        self._log.sync()
        content = durable.json_bytes(summary)
        write_checksums(self.path, content)
        self.write(self.summary_file, content)

    def diverge(self, error: DivergedError) -> None:
        """Notes why the run cannot go on, until it is tried again."""
        self.write(self.diverged_file, durable.json_bytes({"error": str(error)}))

    def retry(self) -> None:
        """Takes back what `diverge` noted."""
        self.check_claim()
        durable.remove(self.diverged_file)

    def _checkpoint(self, round: int) -> Path:
        return self.path / "checkpoint" / f"round-{round:08d}.safetensors"

    def _checkpoints(self) -> list[Path]:
        """Checkpoints, newest first; half-written leftovers are not among them."""
        folder = self.path / "checkpoint"
        try:
            return sorted(
                (path for path in folder.iterdir() if path.match("round-*.safetensors")),
                reverse=True,
            )
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"{folder} cannot be read: {durable.reason(error)}") from None


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
        elif ours != theirs and f"{prefix}{key}".partition(".")[0] not in NOT_HASHED:
            found.append(f"{prefix}{key}")
    return found
