"""Implements `fedensemble ls`."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from ...catalog.listing import listing, listing_table, option_table, topics, topics_table
from ..console import print_line, print_table, working


def print_listing(what: str | None, name: str | None, runs: Path, as_json: bool) -> None:
    """Prints all entries of a kind, or the entry called `name` with all of its options.

    Without a kind, prints which kinds there are.
    """
    if what is None:
        return (
            typer.echo(json.dumps(topics(), indent=2)) if as_json else print_table(topics_table())
        )
    with working(f"Reading {what}"):
        records = listing(what, runs, name)
    if as_json:
        typer.echo(json.dumps(records, indent=2))
    elif name is not None:
        print_table(option_table(what, records[0]))
    elif records:
        print_table(listing_table(what, records))
    else:
        print_line(f"No {what} yet." if what == "runs" else f"No {what}.")
