"""The progress bar of `Federation.train`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from .history import Record

if TYPE_CHECKING:
    from rich.console import Console

Show = Callable[[Sequence[Record]], None]


@contextmanager
def progress_bar(count: int, console: Console | None = None) -> Iterator[Show]:
    """A bar for `count` rounds, as a function that takes the records after each of them.

    It is drawn on a terminal and in a notebook. Elsewhere, as in a log, nothing is printed.

    Args:
        console: where to draw; standard error if None, so that printed results stay clean.
    """
    # Imported here: programs that use `rounds` do not need it.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    console = Console(stderr=True) if console is None else console
    # Without ipywidgets, rich cannot redraw a bar in a notebook and warns instead.
    in_notebook = console.is_jupyter and find_spec("ipywidgets") is not None
    columns = (BarColumn(20), MofNCompleteColumn(), TimeLeft(), TextColumn("{task.description}"))
    hidden = count == 0 or not (in_notebook or (console.is_terminal and not console.is_jupyter))
    with Progress(*columns, console=console, disable=hidden) as bar:
        task = bar.add_task("", total=count)

        def show(records: Sequence[Record]) -> None:
            bar.update(task, advance=1, description=describe_progress(records))

        yield show


def describe_progress(records: Sequence[Record]) -> str:
    """The loss of the last round, and the result of the latest test.

    >>> describe_progress([{"round": 1, "loss": 2.0, "test": {"accuracy": 0.5}}])
    'loss 2.000  accuracy 50.00 %'
    >>> describe_progress([{"round": 1, "loss": None}])
    'no replies'
    """
    loss = records[-1]["loss"]
    text = "no replies" if loss is None else f"loss {loss:.3f}"
    tested: dict[str, float] = next((r["test"] for r in reversed(records) if "test" in r), {})
    if "accuracy" in tested:
        return f"{text}  accuracy {100 * tested['accuracy']:.2f} %"
    return f"{text}  MSE {tested['mse']:.3g}" if "mse" in tested else text
