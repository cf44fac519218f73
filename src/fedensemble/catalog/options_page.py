"""Writes the reference page of all options.

Run `python -m fedensemble.catalog.options_page > docs/ref-options.md`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..core.algorithm import Algorithm
from ..report.tables.result_table import TextTable
from .options import HEADER, KINDS, Option, option_rows, options, own_options, summary

_INTRODUCTION = """\
# Options

The options of all algorithms, datasets, models and other parts that a config selects by name. An
option without a default may be omitted (its description calls that None) unless it is *required*.
All other settings are in [Settings](ref-config.md). `fedensemble ls partitions dirichlet` prints
one entry, `fedensemble ls partitions --json` prints all entries of a kind. This page is generated
from the code: `python -m fedensemble.catalog.options_page > docs/ref-options.md`.
"""


def page() -> str:
    """Returns the page in Markdown; plug-ins of other packages are left out."""
    text = _INTRODUCTION
    for title, kind in KINDS.items():
        rows: list[tuple[str, ...]] = []
        if kind.common:
            rows += [("**all**", "", "", ""), *_cells(options(kind, Algorithm))]
        for name in kind.registry:
            item = kind.registry[name]
            if item.__module__.startswith("fedensemble."):
                rows += [
                    (f"**`{name}`**", "", "", _escaped(summary(item))),
                    *_cells(own_options(kind, item)),
                ]
        place = re.sub(r"(\[[\w.]+\])", r"`\1`", kind.place[0].upper() + kind.place[1:])
        table = TextTable(title, HEADER, tuple(rows)).markdown()
        text += f"\n## {title.capitalize()}\n\n{place}.\n\n{table}"
    return text


def _cells(records: Sequence[Option]) -> list[tuple[str, ...]]:
    """Returns rows of the table, with names and defaults as Markdown code."""
    return [
        (
            f"`{name}`",
            _escaped(values),
            default if default in ("", "required") else f"`{default}`",
            _escaped(what),
        )
        for name, values, default, what in option_rows(records)
    ]


def _escaped(text: str) -> str:
    return text.replace("|", r"\|")


if __name__ == "__main__":
    print(page(), end="")
