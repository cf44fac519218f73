"""Progress of runs: bars with the time left on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import math
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ..config.schema import Config
from ..core.types import RoundReport
from ..experiment.run import RunCallbacks
from ..report.tables.result_table import show
from ..report.time_to_accuracy import hours
from ..text import printable
from .console import console

PLAIN_LINES = 5  # progress lines per run if the output is not a terminal
COMPILING = "The first round compiles kernels for the GPU, up to half a minute"
REFRESH_SECONDS = 0.1  # between two updates of a bar
MANY = 10  # from this number of runs on, each run prints a single progress line


class ProgressDisplay:
    """Shows the progress of one or several runs; a context manager.

    Args:
        console: where to print.
        runs: number of runs; for more than one, an additional bar counts the finished runs.
    """

    def __init__(self, console: Console, runs: int = 1) -> None:
        self.console, self.runs = console, runs
        self._printed: set[str] = set()
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
            disable=not console.is_terminal,
            transient=runs > 1,
            refresh_per_second=4 if runs >= MANY else 10,
        )
        self.total = self.bar.add_task("all runs", total=runs, note="", visible=runs > 1)
        self.preparing = self.bar.add_task(
            "preparing", total=None, note="reads the data", visible=False
        )

    def __enter__(self) -> Self:
        self.bar.update(self.preparing, visible=True)
        self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.bar.update(self.preparing, visible=False)
        self.bar.stop()

    def callbacks(self, label: str) -> RunCallbacks:
        """Returns callbacks for a run, which show it under this label."""
        label = printable(label)
        task = self.bar.add_task(label, total=None, note="", visible=False)
        run_config = Config()  # replaced when the run starts

        def on_train_start(config: Config, rounds_done: int) -> None:
            nonlocal run_config
            run_config = config
            self.bar.update(self.preparing, visible=False)
            note = ""
            if config.engine.device.startswith("cuda") and rounds_done < config.rounds:
                # Up to half a minute without a cache, in which the bar would seem to hang.
                note = COMPILING
                if not self.console.is_terminal:
                    self.say(f"{COMPILING}.")
            self.bar.update(
                task, total=config.rounds, completed=rounds_done, note=note, visible=True
            )

        updated = -math.inf

        def on_round_end(report: RoundReport, metrics: dict[str, float]) -> None:
            nonlocal updated
            rounds = run_config.rounds
            lines = 1 if self.runs >= MANY else PLAIN_LINES
            prints = not self.console.is_terminal and report.round % max(1, rounds // lines) == 0
            # A round of one of many runs may take less time than its line of text.
            shows = self.console.is_terminal and (
                report.round == rounds or time.monotonic() - updated >= REFRESH_SECONDS
            )
            if not prints and not shows:
                return
            updated = time.monotonic()
            text = format_round(report, metrics, run_config.last_test(report.round))
            visible = report.round < rounds or self.runs == 1
            self.bar.update(task, completed=report.round, note=text, visible=visible)
            if prints:
                line = f"{label}: round {report.round}/{rounds}  {text}"
                self.console.print(line, highlight=False, markup=False, emoji=False)

        def on_error(error: Exception) -> None:
            self.bar.update(task, visible=False)
            self.say(f"{label}: {error}")

        return RunCallbacks(self.say, on_train_start, on_round_end, on_error)

    def finished(self) -> None:
        """Counts one more run that is done or has failed."""
        self.bar.advance(self.total)

    def say(self, text: str) -> None:
        """Prints a message above the bars, once even if several runs have the same message."""
        if text in self._printed:
            return
        self._printed.add(text)
        escaped = printable(text, lines=True)
        self.bar.console.print(escaped, highlight=False, markup=False, emoji=False, soft_wrap=True)


def format_round(report: RoundReport, metrics: dict[str, float], tested: int) -> str:
    """Returns a round's loss and the latest test metrics of the ensemble and its modes.

    Args:
        report: of the round.
        metrics: test metrics; empty before the first test.
        tested: the round of the metrics, which is named if it is an earlier one.
    """
    text = "no replies" if report.loss is None else f"loss {report.loss:.3f}"
    if report.turnout is not None:
        text += f"  clock {hours(report.turnout.clock)} h"
    if "accuracy" in metrics:
        low, high = (show("accuracy", metrics[f"mode_accuracy_{end}"]) for end in ("min", "max"))
        text += f"  ensemble {show('accuracy', metrics['accuracy'])} %  modes {low}-{high} %"
    elif "mse" in metrics:
        ensemble, modes = show("mse", metrics["mse"]), show("mse", metrics["mode_mse_mean"])
        text += f"  ensemble MSE {ensemble}  modes {modes}"
    return text if tested == report.round or not metrics else f"{text}  (round {tested})"


class EpochBar:
    """A bar over the epochs of one training with its loss; a context manager.

    Args:
        name: of the training.
        epochs: their number.
    """

    def __init__(self, name: str, epochs: int) -> None:
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task(name, total=epochs, note="")

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def advance(self, epochs: int, loss: float) -> None:
        """Shows the number of epochs so far, and the loss of the last one."""
        self.bar.update(self.task, completed=epochs, note=f"loss {loss:.4g}")
