"""Trackers for TensorBoard and MLflow; their packages are imported only if a run uses them."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..checkpoint_file import write_json
from ..errors import StoreError
from ..redact import redact
from .tracker import Record, Tracker, flatten, scalars, trackers

__all__ = ["MLflow", "TensorBoard", "trackers"]


@trackers.register("tensorboard")
class TensorBoard(Tracker):
    """Writes event files to the run's folder; view them with `tensorboard --logdir runs`."""

    package, trace = "tensorboard", "tensorboard"

    def __init__(
        self, folder: Path, settings: Mapping[str, Any], records: Sequence[Record]
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter

        event_folder = folder / self.trace
        # Event files cannot be truncated, and may contain rounds after the checkpoint, which the
        # resumed run trains again. Write all rounds again.
        shutil.rmtree(event_folder, ignore_errors=True)
        self.writer: Any = SummaryWriter(str(event_folder))
        self.writer.add_text(
            "config", "".join(f"    {key} = {value}\n" for key, value in flatten(settings).items())
        )
        for record in records:
            self.record(record)

    def record(self, record: Record) -> None:
        for name, value in scalars(record).items():
            self.writer.add_scalar(name, value, record["round"])

    def close(self, finished: bool) -> None:
        self.writer.close()


@trackers.register("mlflow")
class MLflow(Tracker):
    """Logs to MLFLOW_TRACKING_URI; if it is not set, to `mlflow.db` next to the run's folder."""

    package, trace = "mlflow", "mlflow.json"

    def __init__(
        self, folder: Path, settings: Mapping[str, Any], records: Sequence[Record]
    ) -> None:
        from mlflow import MlflowClient

        parent = folder.resolve().parent
        self.uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{parent / 'mlflow.db'}"
        self.client: Any = MlflowClient(tracking_uri=self.uri)
        self.file = folder / self.trace
        existing = self._find_run()
        self.run_id, self.last_round = existing or (self._create_run(settings, parent), 0)
        for record in records:
            self.record(record)

    def _find_run(self) -> tuple[str, int] | None:
        """Returns the id of the MLflow run of this folder and its last logged round, or None."""
        from mlflow.exceptions import MlflowException

        try:
            saved = json.loads(self.file.read_text(encoding="utf-8"))
            run_id = saved["run_id"]
            if redact(saved["uri"]) != redact(self.uri):
                return None
            self.client.update_run(run_id, status="RUNNING")
            history = self.client.get_metric_history(run_id, "train/loss")
        # There is no such run yet, or it was deleted from MLflow.
        except (OSError, ValueError, KeyError, TypeError, MlflowException):
            return None
        if saved["uri"] != redact(saved["uri"]):
            # Earlier versions wrote the address with its credentials: overwrite it.
            self._write_run_id(run_id)
        return run_id, max((metric.step for metric in history), default=0)

    def _create_run(self, settings: Mapping[str, Any], parent: Path) -> str:
        """Creates an MLflow run, in the experiment with the config's name, and returns its id."""
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        name = str(settings["name"])
        try:
            experiment = self.client.get_experiment_by_name(name)
            if experiment:
                experiment_id = experiment.experiment_id
            else:
                on_server = bool(os.environ.get("MLFLOW_TRACKING_URI"))
                artifacts = None if on_server else (parent / "mlflow-artifacts").as_uri()
                experiment_id = self.client.create_experiment(name, artifacts)
            run = self.client.create_run(experiment_id, run_name=self.file.parent.name)
            run_id = str(run.info.run_id)
            params = [Param(key, str(value)[:500]) for key, value in flatten(settings).items()]
            self.client.log_batch(run_id, params=params[:100])  # MLflow's limit per request
        except MlflowException as error:
            raise self._store_error(error) from None
        self._write_run_id(run_id)
        return run_id

    def _write_run_id(self, run_id: str) -> None:
        """Saves address and id of the run, so that a resumed run continues the log.

        The address is saved without credentials; those are read from the environment each time.
        """
        write_json(self.file, {"uri": redact(self.uri), "run_id": run_id})

    def _store_error(self, error: Exception) -> StoreError:
        """Returns the error for the user; removes credentials, which MLflow's message may quote."""
        message = (str(error).splitlines() or [type(error).__name__])[0]
        return StoreError(f"MLflow at {redact(self.uri)} rejected the run: {redact(message)}")

    def record(self, record: Record) -> None:
        if record["round"] <= self.last_round:
            return
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException

        now = int(1000 * time.time())
        metrics = [
            Metric(name, value, now, record["round"]) for name, value in scalars(record).items()
        ]
        try:
            for first in range(0, len(metrics), 1000):  # MLflow's limit per request
                self.client.log_batch(self.run_id, metrics=metrics[first : first + 1000])
        except MlflowException as error:
            raise self._store_error(error) from None

    def close(self, finished: bool) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self.client.set_terminated(self.run_id, "FINISHED" if finished else "KILLED")
        except MlflowException as error:
            raise self._store_error(error) from None
