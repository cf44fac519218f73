"""The folder of a run: config, environment, metrics, checkpoints, modes, summary.

`summary.json` is written last; a run that has one is finished. The process may be killed at any
time: the files on disk always suffice to resume the run, and it ends with the same bytes. A
checkpoint holds the tensors and the records of all rounds before it. The checkpoint and its
directory entry are synced to disk before an older checkpoint is deleted.
"""

from __future__ import annotations

import tomllib
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from ... import durable
from ...checkpoint_file import check_start, read_checkpoint, write_checkpoint
from ...config.schema import NOT_HASHED, Config, check
from ...errors import DivergedError, InputError, StoreError
from ...flat_params import Tree
from .checksums import FILE as CHECKSUMS
from .checksums import changed_files, describe_changes, write_checksums
from .folder_lock import LOCK, FolderLock
from .metrics_log import MetricsLog, decode_records, encode_record, unpack
from .read_json import need_keys, need_numbers, read_bytes, read_json, read_table

__all__ = ["MAX_CHECKPOINTS", "RunFolder", "Say", "find_runs", "read_json"]

MAX_CHECKPOINTS = 2  # if the newest one is damaged, the run resumes from the one before it
_METRICS = "metrics"  # name of the tensor that holds the records of all rounds in a checkpoint
# Keys that every version has written to config.toml. A file without them was truncated. It may
# still be valid TOML, and defaults would silently replace what is missing.
_REQUIRED_KEYS = (
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
    """The files of one run; only one process at a time may train in the folder.

    Args:
        path: the folder; it is created by `claim`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file, self.metrics_file = path / "config.toml", path / "metrics.jsonl"
        self.modes_file, self.summary_file = path / "modes.safetensors", path / "summary.json"
        self.diverged_file = path / "diverged.json"
        self.clients_file, self.predictions_file = path / "clients.json", path / "predictions.json"
        self.distillation_file = path / "distillation.json"
        self._lock, self._log = FolderLock(path), MetricsLog(self.metrics_file)
        self._config = Config()  # of `claim`
        self.extends: int | None = None  # rounds of the run that a claim with more rounds continues
        self._new = False  # whether `release` deletes the folder if nothing was trained in it
        self._added: list[Path] = []  # folders that `claim` creates

    def claim(self, config: Config, *, begin: bool = True) -> None:
        """Locks the folder for this process; raises if another config or process uses it.

        Args:
            config: of the run.
            begin: write config.toml now. Otherwise `resume` writes it, the folder may hold the same
                run with fewer rounds, and `release` deletes a new folder in which no round was
                trained.
        """
        self._config = config
        rounds = self._check_owner(config)
        if rounds is not None and begin:
            raise self._other_settings(["rounds"])
        self._added = [] if begin else self._missing_folders()
        self._lock.acquire()
        try:
            self._new = not begin and not self.config_file.exists()
            self.extends = rounds
            if begin:
                self._begin()
        except BaseException:
            self.release()
            raise

    def _begin(self) -> None:
        """Writes config.toml; a finished run with fewer rounds becomes an unfinished one.

        Its checkpoint holds everything that is needed to finish it again. Its summary is deleted
        before its config is replaced: a kill in between leaves the shorter run, unfinished.
        """
        if self.extends is not None:
            self.check_claim()
            durable.remove(self.summary_file, self.path / CHECKSUMS)
        if self.extends is not None or not self.config_file.exists():
            self.write(self.config_file, self._config.toml().encode())
        self.extends = None

    def release(self) -> None:
        """Unlocks the folder; deletes it if it is new and nothing was trained in it."""
        # A start that is refused (data that do not fit, too little memory) must not leave an
        # unfinished run behind. Errors are ignored: another one is being raised already.
        with suppress(StoreError, OSError):
            self._lock.check()
            self._log.flush()
        with suppress(StoreError, OSError):
            if self._new and not (self.done or self.diverged_file.exists() or self.metrics()):
                self._lock.check()
                self._delete_files()
                for folder in self._added:
                    durable.disk.remove_folder(folder)  # raises if it holds other runs
        self._lock.release()
        self._new = False

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the folder, which is created if it is missing, for a federation that is saved."""
        self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    def delete(self) -> None:
        """Deletes the folder; raises if another process uses it."""
        self._lock.acquire()
        try:
            self._delete_files()
            durable.disk.remove_folder(self.path)
        finally:
            self._lock.release()

    def _delete_files(self) -> None:
        """Deletes all files of the locked folder, and its lock."""
        # Without summary.json the run is unfinished, and without config.toml the folder is no run:
        # what an interrupted deletion leaves is recognized, and can be deleted again.
        durable.remove(self.summary_file)
        for path in sorted(self.path.iterdir(), key=lambda path: path == self.config_file):
            if path.name != LOCK:
                durable.remove_tree(path)
        self._lock.delete()

    def _missing_folders(self) -> list[Path]:
        """Returns the folder and those of its parents that do not exist yet, innermost first."""
        return [folder for folder in (self.path, *self.path.parents) if not folder.exists()]

    def check_claim(self) -> None:
        """Raises if the folder was deleted or replaced since `claim`; call it before each write."""
        self._lock.check()

    def write(self, file: Path, content: bytes) -> None:
        """Writes a file of the folder, atomically."""
        self.check_claim()
        durable.write_bytes(file, content)

    def _check_owner(self, config: Config) -> int | None:
        """Raises unless the folder is new, empty, or belongs to a run with the same config.

        Returns:
            the number of rounds if the run differs only in having fewer; None otherwise.
        """
        if self.path.exists() and not self.path.is_dir():
            raise StoreError(
                f"{self.path} is a file; a run needs a folder. Choose another --out or --runs."
            )
        self.refuse_distilled()
        if not self.config_file.exists():
            if self.path.is_dir() and any(
                name != LOCK and not durable.is_leftover(name) for name in self._names()
            ):
                raise StoreError(
                    f"{self.path} holds other files, but no run. Choose another --out or --runs."
                )
            return None
        keys, rounds = self.differs_from(config)
        if keys == ["rounds"] and rounds < config.rounds:
            return rounds
        if keys:
            shorter = "A run can be extended, but not shortened. " if keys == ["rounds"] else ""
            raise self._other_settings(keys, shorter)
        return None

    @property
    def is_distilled(self) -> bool:
        """Whether the folder holds a distilled model, which has no rounds of its own."""
        return self.distillation_file.exists()

    def refuse_distilled(self) -> None:
        """Raises if the folder holds a distilled model: there is nothing to train further."""
        if self.is_distilled:
            raise StoreError(
                f"{self.path} holds a distilled model, which cannot be trained for more rounds. "
                "Train the run that it came from, and distil that again."
            )

    def differs_from(self, config: Config) -> tuple[list[str], int]:
        """Returns the settings of this run that differ from a config, and its rounds."""
        return self.differing_keys(config.values()), int(self.read_config()["rounds"])

    def differing_keys(self, values: Mapping[str, Any]) -> list[str]:
        """Returns the settings of this run that differ from those of another, with all defaults."""
        return sorted(_differing_keys(_with_defaults(self.read_config()), values))

    def _other_settings(self, keys: list[str], advice: str = "") -> StoreError:
        return StoreError(
            f"{self.path} belongs to a run with other settings "
            f"({', '.join(keys[:5])}). {advice}Choose another --out or --runs."
        )

    def _names(self) -> list[str]:
        try:
            return [entry.name for entry in self.path.iterdir()]
        except OSError as error:
            raise StoreError(
                f"{self.path} cannot be read: {durable.describe_os_error(error)}"
            ) from None

    def read_config(self) -> dict[str, Any]:
        """Returns the settings in config.toml."""
        if not self.path.exists():
            raise InputError(
                f"{self.path} is not a run: there is no such folder. "
                "'fedensemble ls runs' shows all runs."
            )
        if not self.config_file.exists():
            raise InputError(f"{self.path} is not a run: it has no config.toml.")
        try:
            values = tomllib.loads(read_bytes(self.config_file).decode("utf-8"))
        except RecursionError:
            raise StoreError(f"{self.config_file} cannot be read: it is nested too deep.") from None
        except ValueError as error:  # not UTF-8, or not TOML
            raise StoreError(f"{self.config_file} cannot be read: {error}.") from None
        need_keys(self.config_file, values, _REQUIRED_KEYS)
        return values

    @property
    def done(self) -> bool:
        """Whether the run is finished."""
        return self.summary_file.exists()

    @property
    def state(self) -> str:
        """One of "done", "diverged" and "unfinished".

        A diverged run may be finished: its loss exploded, but stayed finite.
        """
        return "diverged" if self.diverged_file.exists() else "done" if self.done else "unfinished"

    def summary(self) -> dict[str, Any]:
        """Returns the summary of a finished run; raises if the run is not finished."""
        if not self.done:
            raise InputError(
                f"The run in {self.path} is not finished; start its command again to resume it."
            )
        try:
            summary = read_table(self.summary_file)
            need_keys(self.summary_file, summary, ("name",))
            need_numbers(self.summary_file, summary, ("rounds", "modes", "bytes_up", "bytes_down"))
        except StoreError as error:
            raise StoreError(f"{error} {self._repair_advice()}") from None
        return summary

    def changes(self) -> str:
        """Returns a message if files have changed since the run finished; empty otherwise."""
        names = changed_files(self.path) if self.done else []
        return describe_changes(self.path, names) if names else ""

    def require_unchanged(self, *names: str) -> None:
        """Raises if one of these files has changed since the run finished."""
        if changed := [name for name in changed_files(self.path) if name in names]:
            raise StoreError(describe_changes(self.path, changed))

    def check_modes(self) -> None:
        """Raises if modes.safetensors is damaged; checks only its header and its length."""
        try:
            check_start(self.modes_file)
        except StoreError as error:
            raise self.unreadable_modes(error) from None

    def unreadable_modes(self, error: StoreError) -> StoreError:
        """Returns the error for modes that cannot be read, with advice."""
        return StoreError(f"{error} {self._repair_advice()}")

    def _repair_advice(self) -> str:
        return (
            f"Delete {self.summary_file} and start the run's command again: "
            "it resumes from the last checkpoint."
        )

    def metrics(self) -> list[dict[str, Any]]:
        """Returns one record per round; a last line that is incomplete is ignored."""
        return self._log.records()

    def delay_metrics(self, seconds: float) -> None:
        """Lets records wait in memory, and writes them together after so many seconds.

        A kill loses those that wait. A checkpoint contains them all, and a run that resumes trains
        the rounds after it again.
        """
        self._log.delay = seconds

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Appends the record of a round."""
        self.check_claim()
        self._log.append(record)

    def set_metrics(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Replaces the records of all rounds."""
        self.check_claim()
        self._log.restore(b"".join(map(encode_record, records)))

    def save(self, tensors: Mapping[str, Tensor], round: int, facts: Mapping[str, Any]) -> None:
        """Writes a checkpoint with the metrics so far, and deletes old checkpoints.

        Only this user can read the files: checkpoints contain client state.

        Args:
            tensors: of the federation.
            round: number of rounds done.
            facts: that must be equal when the checkpoint is resumed (the data's fingerprint).
        """
        self.check_claim()
        self._log.sync()
        path = self.checkpoint(round)
        metadata = {**facts, "round": round, **self._log.facts()}
        write_checkpoint(path, {**tensors, _METRICS: self._log.packed()}, metadata, private=True)
        # Earlier versions created this folder with the default permissions.
        durable.make_private(path.parent)
        durable.sync_now()
        durable.remove(*self.checkpoints()[MAX_CHECKPOINTS:])

    def resume(
        self, facts: Mapping[str, Any], say: Say, others: Sequence[Path] = ()
    ) -> tuple[dict[str, Tensor], int] | None:
        """Returns tensors and round of the newest intact checkpoint; None if there is none.

        Also writes config.toml, unless `claim` has, and truncates metrics.jsonl to the rounds of
        that checkpoint. Damaged checkpoints are skipped with a message.

        Args:
            facts: must equal those that the checkpoint was saved with (the data's fingerprint).
            say: called with messages for the user.
            others: checkpoints of runs that differ only in their number of rounds, best first; used
                if this run has none.
        """
        self.check_claim()
        checkpoints = self.checkpoints()
        for path in checkpoints:
            try:
                tensors, metadata = read_checkpoint(path)
                need_numbers(path, metadata, ("round", "metrics_bytes"), "its metadata")
            except StoreError as error:
                fallback = (
                    "There is none before it: starting again from round 0."
                    if path == checkpoints[-1]
                    else "Going back to the one before."
                )
                say(f"{error} {fallback}")
                continue
            if any(metadata.get(key) != value for key, value in facts.items()):
                raise StoreError(
                    f"{self.path} was trained on other data, or the data have changed since. "
                    "Choose another --out or --runs, or delete the folder."
                )
            self._begin()
            self._restore_metrics(path, tensors.pop(_METRICS, None), metadata, say)
            # A process that was killed in `save` may not have deleted the old checkpoints.
            if path == checkpoints[0]:
                durable.remove(*checkpoints[MAX_CHECKPOINTS:])
            return tensors, int(metadata["round"])
        for path in others:
            if adopted := self._adopt(path, facts):
                say(f"Extending {path.parent.parent}, which is kept as it is.")
                return adopted
        if self.extends is not None:
            raise StoreError(
                f"{self.path} cannot be extended: its checkpoints are missing or damaged. "
                "Choose another --out or --runs to train from round 0."
            )
        self._begin()
        self._log.restore(b"")
        return None

    def newest(self) -> tuple[Path, Tree, dict[str, Any], list[dict[str, Any]]] | None:
        """Returns path, tensors, metadata and records of the newest checkpoint, or None.

        It changes no file. If the checkpoint is damaged, the one before is used, with a warning.
        """
        paths = self.checkpoints()
        for path in paths:
            try:
                tensors, metadata = read_checkpoint(path)
            except StoreError as error:
                if path == paths[-1]:
                    raise
                warnings.warn(f"{error} Going back to the one before.", stacklevel=6)
                continue
            packed = tensors.pop(_METRICS, None)
            size = metadata.get("metrics_bytes", 0)
            if packed is None:  # earlier versions have the records in metrics.jsonl only
                round = metadata.get("round")
                lines: bytes | None = self._log.salvage(round if type(round) is int else 0)
            else:
                lines = unpack(packed, size if type(size) is int else -1)
            return path, tensors, metadata, decode_records(lines or b"")
        return None

    def _adopt(self, path: Path, facts: Mapping[str, Any]) -> tuple[dict[str, Tensor], int] | None:
        """Returns tensors and round of another run's checkpoint, and takes over its records.

        Returns None if the checkpoint is damaged, has gone, or belongs to other data.
        """
        try:
            tensors, metadata = read_checkpoint(path)
            need_numbers(path, metadata, ("round", "metrics_bytes"), "its metadata")
        except StoreError:
            return None
        packed = tensors.pop(_METRICS, None)
        records = None if packed is None else unpack(packed, int(metadata["metrics_bytes"]))
        if records is None or any(metadata.get(key) != value for key, value in facts.items()):
            return None
        self._begin()
        self._log.restore(records)
        return tensors, int(metadata["round"])

    def drop_test(self, config: Config, keys: Collection[str], final: Collection[str] = ()) -> None:
        """Removes the test from the last record if the config has none after that round.

        The last round of a run is always tested. In a longer run it need not be, and a run that was
        extended must have the records of one that was not.

        Args:
            config: of the run.
            keys: of a test in a record.
            final: of what only the last round of a run records.
        """
        records = self.metrics()
        if not records or records[-1]["round"] >= config.rounds:
            return
        tested = records[-1]["round"] == config.last_test(records[-1]["round"])
        dropped = {*final} if tested else {*final, *keys}
        last = {key: value for key, value in records[-1].items() if key not in dropped}
        if last != records[-1]:
            lines = self._log.read().splitlines(keepends=True)
            self._log.restore(b"".join(lines[:-1]) + encode_record(last))

    def _restore_metrics(
        self, path: Path, packed: Tensor | None, metadata: Mapping[str, Any], say: Say
    ) -> None:
        """Sets metrics.jsonl to the records of the rounds up to a checkpoint.

        They are in the checkpoint. Earlier versions stored only their hash; then the intact records
        of the file are used. Missing records are reported, but never prevent a run from resuming.

        Args:
            path: of the checkpoint, for messages.
            packed: the records in the checkpoint, or None.
            metadata: of the checkpoint.
            say: called with messages for the user.
        """
        round, size = int(metadata["round"]), int(metadata["metrics_bytes"])
        content = None if packed is None else unpack(packed, size)
        if content is not None:
            if not self._log.restore(content):
                say(
                    f"{self.metrics_file} did not match {path.name}; "
                    "its records were restored from the checkpoint."
                )
            return
        content = self._log.salvage(round)
        self._log.restore(content)
        missing = round - content.count(b"\n")
        if missing or self._log.facts()["metrics_sha256"] != metadata.get("metrics_sha256"):
            lost = (
                f" The records of its last {missing} rounds are lost; totals do not include them."
                if missing
                else ""
            )
            say(
                f"{self.metrics_file} does not match {path.name}; "
                f"training resumes from the checkpoint.{lost}"
            )

    def resume_advice(self) -> str:
        """Returns a sentence on the newest checkpoint, and how to resume from it."""
        checkpoints = self.checkpoints()
        if not checkpoints:
            return "There is no checkpoint yet; start the same command again."
        last = _round_of(checkpoints[0])
        return (
            f"The checkpoint of round {last} in {self.path} is intact; "
            "start the same command again to go on."
        )

    def intact(self, config: Config) -> bool:
        """Whether a restart can use the folder: every file it reads is as it was written.

        Only a power cut during `durable.sync_later` can leave another one.
        """
        try:
            if self.differs_from(config)[0]:
                return False
            if self.done:
                self.summary()
                read_checkpoint(self.modes_file)
                names = read_table(self.path / CHECKSUMS)
                missing = [name for name in names if not (self.path / name).is_file()]
                return not missing and not changed_files(self.path)
        except (InputError, StoreError):
            return False
        return True

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Writes summary.json, which marks the run as done, after all other files are durable."""
        self.check_claim()
        self._log.sync()
        content = durable.json_bytes(summary)
        write_checksums(self.path, content)
        self.write(self.summary_file, content)

    def mark_diverged(self, error: DivergedError) -> None:
        """Writes diverged.json with the error."""
        self.write(self.diverged_file, durable.json_bytes({"error": str(error)}))

    def divergence(self) -> str:
        """Returns why the run has diverged; empty if it has not."""
        if not self.diverged_file.exists():
            return ""
        return str(read_table(self.diverged_file).get("error", "unknown reason"))

    def clear_diverged(self) -> None:
        """Deletes diverged.json, because the run is trained again."""
        self.check_claim()
        durable.remove(self.diverged_file)

    def checkpoints_before(self, round: int) -> list[Path]:
        """Returns the paths of the checkpoints of earlier rounds, newest first."""
        return [path for path in self.checkpoints() if _round_of(path) < round]

    def checkpoint(self, round: int) -> Path:
        return self.path / "checkpoint" / f"round-{round:08d}.safetensors"

    def checkpoints(self) -> list[Path]:
        """Returns the paths of all checkpoints, newest first, without temporary files."""
        folder = self.path / "checkpoint"
        try:
            return sorted(
                (path for path in folder.iterdir() if path.match("round-*.safetensors")),
                reverse=True,
            )
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(
                f"{folder} cannot be read: {durable.describe_os_error(error)}"
            ) from None


def _round_of(checkpoint: Path) -> int:
    return int(checkpoint.stem.removeprefix("round-"))


def find_runs(root: Path) -> list[RunFolder]:
    """Returns all runs below a folder."""
    return [RunFolder(path.parent) for path in sorted(root.glob("**/config.toml"))]


def _with_defaults(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of a run folder, with the defaults of keys that were added after it was written.

    Without them an unfinished run of an earlier version could not be resumed. Settings that are no
    longer valid are returned as they are, and are then reported as different.
    """
    config, _ = check(values)
    return values if config is None else tomllib.loads(config.toml())


def _differing_keys(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Returns the dotted keys whose values differ, without settings that do not affect results."""
    keys = []
    for key in {*a, *b}:
        value_a, value_b = a.get(key), b.get(key)
        if isinstance(value_a, Mapping) and isinstance(value_b, Mapping):
            keys += _differing_keys(value_a, value_b, f"{prefix}{key}.")
        elif value_a != value_b and f"{prefix}{key}".partition(".")[0] not in NOT_HASHED:
            keys.append(f"{prefix}{key}")
    return keys
