"""Where commands print: tables are drawn on a terminal, and plain Markdown elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer
from rich.console import Console

from ..text import printable

if TYPE_CHECKING:  # `--help` is not to wait for it
    from ..report.tables import TextTable

console = Console(soft_wrap=True, markup=False, highlight=False, emoji=False)


def print_line(text: object) -> None:
    """Prints a line as it is: what looks like rich's markup is text, and control characters are
    shown as escapes.
    """
    console.print(printable(str(text)), markup=False, highlight=False, emoji=False)


def print_table(table: TextTable) -> None:
    """A table for the terminal; plain Markdown elsewhere."""
    if not console.is_terminal:
        typer.echo(f"\n{printable(table.title, lines=True)}\n\n{table.markdown()}")
        return
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=Text(printable(table.title, lines=True)), title_justify="left")
    for column, name in enumerate(table.header):
        justify = "right" if table.numeric(column) else "left"
        drawn.add_column(Text(printable(name)), justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in table.rows:
        drawn.add_row(*(Text(printable(cell)) for cell in row))
    console.print(drawn, soft_wrap=False)
