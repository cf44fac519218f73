"""What `fedensemble ls` does."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from ..catalog.listing import listing, listing_table, option_table
from .console import print_line, print_table


def print_listing(what: str, name: str | None, runs: Path, as_json: bool) -> None:
    """Prints everything of a kind, or the one of that name with each of its options."""
    found = listing(what, runs, name)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    elif name is not None:
        print_table(option_table(what, found[0]))
    elif found:
        print_table(listing_table(what, found))
    else:
        print_line(f"No {what} yet." if what == "runs" else f"No {what}.")
