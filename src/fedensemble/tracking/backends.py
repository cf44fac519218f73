"""TensorBoard and MLflow as trackers; their packages are imported when one is made."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..checkpoint import write_json
from ..errors import StoreError
from ..redact import redact
from .tracker import Record, Tracker, flat, scalars, trackers

__all__ = ["MLflow", "TensorBoard", "trackers"]


@trackers.register("tensorboard")
class TensorBoard(Tracker):
    """Event files in the run's folder: `tensorboard --logdir runs`."""

    package, trace = "tensorboard", "tensorboard"

    def __init__(
        self, folder: Path, settings: Mapping[str, Any], records: Sequence[Record]
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter

        place = folder / self.trace
        # written anew: it may hold rounds that the resumed run repeats
        shutil.rmtree(place, ignore_errors=True)
        self.writer: Any = SummaryWriter(str(place))
        self.writer.add_text(
            "config", "".join(f"    {key} = {value}\n" for key, value in flat(settings).items())
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
    """A run at MLFLOW_TRACKING_URI, or in `mlflow.db` beside the run's folder where that is not
    set.
    """

    package, trace = "mlflow", "mlflow.json"

    def __init__(
        self, folder: Path, settings: Mapping[str, Any], records: Sequence[Record]
    ) -> None:
        from mlflow import MlflowClient

        beside = folder.resolve().parent
        self.uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{beside / 'mlflow.db'}"
        self.client: Any = MlflowClient(tracking_uri=self.uri)
        self.file = folder / self.trace
        self.run, self.told = self._known() or (self._new(settings, beside), 0)
        for record in records:
            self.record(record)

    def _known(self) -> tuple[str, int] | None:
        """The run of before and the last round it was told, or None."""
        from mlflow.exceptions import MlflowException

        try:
            held = json.loads(self.file.read_text(encoding="utf-8"))
            if redact(held["uri"]) != redact(self.uri):
                return None
            self.client.update_run(held["run_id"], status="RUNNING")
            told = self.client.get_metric_history(held["run_id"], "train/loss")
        # none yet, or deleted there
        except (OSError, ValueError, KeyError, TypeError, MlflowException):
            return None
        if held["uri"] != redact(held["uri"]):  # written before credentials were left out
            self._write(held["run_id"])
        return held["run_id"], max((metric.step for metric in told), default=0)

    def _new(self, settings: Mapping[str, Any], beside: Path) -> str:
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        name = str(settings["name"])
        try:
            experiment = self.client.get_experiment_by_name(name)
            place = (
                None
                if os.environ.get("MLFLOW_TRACKING_URI")
                else (beside / "mlflow-artifacts").as_uri()
            )
            key = (
                experiment.experiment_id
                if experiment
                else self.client.create_experiment(name, place)
            )
            run = str(self.client.create_run(key, run_name=self.file.parent.name).info.run_id)
            params = [Param(name, str(value)[:500]) for name, value in flat(settings).items()]
            self.client.log_batch(run, params=params[:100])
        except MlflowException as error:
            raise self._refused(error) from None
        self._write(run)
        return run

    def _write(self, run: str) -> None:
        """Notes where the run is; without the credentials, which are those of the environment next
        time, too.
        """
        write_json(self.file, {"uri": redact(self.uri), "run_id": run})

    def _refused(self, error: Exception) -> StoreError:
        """MLflow's own words may hold the whole address."""
        said = (str(error).splitlines() or [type(error).__name__])[0]
        return StoreError(f"MLflow at {redact(self.uri)} refused the run: {redact(said)}")

    def record(self, record: Record) -> None:
        if record["round"] <= self.told:
            return
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException

        now = int(1000 * time.time())
        metrics = [
            Metric(name, value, now, record["round"]) for name, value in scalars(record).items()
        ]
        try:
            for first in range(0, len(metrics), 1000):  # a server takes no more at once
                self.client.log_batch(self.run, metrics=metrics[first : first + 1000])
        except MlflowException as error:
            raise self._refused(error) from None

    def close(self, finished: bool) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self.client.set_terminated(self.run, "FINISHED" if finished else "KILLED")
        except MlflowException as error:
            raise self._refused(error) from None
