"""Output of the commands: tables are drawn on a terminal, and plain Markdown elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from ..text import printable

# Importing it would load torch, which takes seconds and `--help` does not need.
if TYPE_CHECKING:
    from ..report.tables.result_table import TextTable

console = Console(soft_wrap=True, markup=False, highlight=False, emoji=False)


def print_line(text: object) -> None:
    """Prints a line verbatim: no rich markup, and control characters shown as escapes."""
    console.print(printable(str(text)), markup=False, highlight=False, emoji=False)


@contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """Shows on a terminal what a command is doing and for how long, until the block ends.

    Elsewhere nothing is shown. Yields a function that changes the text. Lines that are printed
    meanwhile appear above. Bars of training cannot be shown in the block.
    """
    if not console.is_terminal:
        yield lambda text: None
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    shown = TextColumn("{task.description}", markup=False)
    with Progress(
        SpinnerColumn(), shown, TimeElapsedColumn(), console=console, transient=True
    ) as progress:
        task = progress.add_task(printable(text), total=None)
        yield lambda text: progress.update(task, description=printable(text))


def print_table(table: TextTable) -> None:
    """Prints a table: drawn on a terminal, as Markdown if the output is a file or a pipe."""
    if not console.is_terminal:
        typer.echo(f"\n{printable(table.title, lines=True)}\n\n{table.markdown()}")
        return
    from rich.table import Table
    from rich.text import Text

    rich_table = Table(title=Text(printable(table.title, lines=True)), title_justify="left")
    for column, name in enumerate(table.header):
        justify = "right" if table.numeric(column) else "left"
        rich_table.add_column(Text(printable(name)), justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in table.rows:
        rich_table.add_row(*(Text(printable(cell)) for cell in row))
    console.print(rich_table, soft_wrap=False)
