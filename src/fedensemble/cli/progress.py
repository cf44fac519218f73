"""Live progress: a bar with the time left on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

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
from ..report.tables import show
from ..report.time_to_accuracy import hours
from ..text import printable

PLAIN_LINES = 5  # progress lines of a run when nobody sits at a terminal
MANY = 10  # runs, of which each says one line


class Live:
    """Shows runs as they go; `watcher` gives what a run reports to."""

    def __init__(self, console: Console, runs: int = 1) -> None:
        self.console, self.runs = console, runs
        self._said: set[str] = set()
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
        )
        self.total = self.bar.add_task("all runs", total=runs, note="", visible=runs > 1)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.bar.stop()

    def watcher(self, label: str) -> RunCallbacks:
        """Who watches a run of this label."""
        label = printable(label)
        task = self.bar.add_task(label, total=None, note="", visible=False)
        run = Config()  # until it starts

        def started(config: Config, done: int) -> None:
            nonlocal run
            run = config
            self.bar.update(task, total=run.rounds, completed=done, visible=True)

        def advanced(report: RoundReport, metrics: dict[str, float]) -> None:
            text = note(report, metrics, run.last_test(report.round))
            left = report.round < run.rounds or self.runs == 1
            self.bar.update(task, completed=report.round, note=text, visible=left)
            lines = 1 if self.runs >= MANY else PLAIN_LINES
            if not self.console.is_terminal and report.round % max(1, run.rounds // lines) == 0:
                line = f"{label}: round {report.round}/{run.rounds}  {text}"
                self.console.print(line, highlight=False, markup=False, emoji=False)

        def failed(error: Exception) -> None:
            self.bar.update(task, visible=False)
            self.say(f"{label}: {error}")

        return RunCallbacks(say=self.say, started=started, advanced=advanced, failed=failed)

    def finished(self) -> None:
        """Counts one run as done, or as failed."""
        self.bar.advance(self.total)

    def say(self, text: str) -> None:
        """A line above the bars; what several runs have to say is said once."""
        if text in self._said:
            return
        self._said.add(text)
        shown = printable(text, lines=True)
        self.bar.console.print(shown, highlight=False, markup=False, emoji=False, soft_wrap=True)


def note(report: RoundReport, metrics: dict[str, float], tested: int) -> str:
    """The loss of a round and the latest test of the ensemble and its modes; which round's, if not
    of this one.
    """
    text = "nobody answered" if report.loss is None else f"loss {report.loss:.3f}"
    if report.turnout is not None:
        text += f"  clock {hours(report.turnout.clock)} h"
    if "accuracy" in metrics:
        low, high = (show("accuracy", metrics[f"mode_accuracy_{end}"]) for end in ("min", "max"))
        text += f"  ensemble {show('accuracy', metrics['accuracy'])} %  modes {low}-{high} %"
    elif "mse" in metrics:
        text += f"  ensemble MSE {show('mse', metrics['mse'])}  modes {show('mse', metrics['mode_mse_mean'])}"
    return text if tested == report.round or not metrics else f"{text}  (round {tested})"
