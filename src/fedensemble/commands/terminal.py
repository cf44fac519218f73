"""Where commands print: tables are drawn on a terminal, and plain Markdown elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer
from rich.console import Console

if TYPE_CHECKING:  # `--help` is not to wait for it
    from ..report.tables import TextTable

console = Console(soft_wrap=True)


def print_table(table: TextTable) -> None:
    """A table for the terminal; plain Markdown elsewhere."""
    if not console.is_terminal:
        typer.echo(f"\n{table.title}\n\n{table.markdown()}")
        return
    from rich.markup import escape
    from rich.table import Table

    drawn = Table(title=escape(table.title), title_justify="left")
    for column, name in enumerate(table.header):
        drawn.add_column(escape(name), justify="right" if table.numeric(column) else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*map(escape, row))
    console.print(drawn, soft_wrap=False)
