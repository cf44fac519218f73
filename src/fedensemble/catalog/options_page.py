"""The reference page of all options: python -m fedensemble.catalog.options_page >
docs/ref-options.md.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..core.algorithm import Algorithm
from ..report.tables import TextTable
from .options import HEADER, KINDS, Option, option_rows, options, own, summary

_INTRODUCTION = """\
# Options

Of everything that is chosen by name. An option without a default may be left out (its text calls that None) unless it
is *required*. All other settings are in [Settings](ref-config.md). `fedensemble ls partitions dirichlet` prints one,
`fedensemble ls partitions --json` all of a kind. This page is made from the code:
`python -m fedensemble.catalog.options_page > docs/ref-options.md`.
"""


def page() -> str:
    """The page in Markdown, of what this package brings along."""
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
                    *_cells(own(kind, item)),
                ]
        place = re.sub(r"(\[[\w.]+\])", r"`\1`", kind.place[0].upper() + kind.place[1:])
        text += f"\n## {title.capitalize()}\n\n{place}.\n\n{TextTable(title, HEADER, tuple(rows)).markdown()}"
    return text


def _cells(found: Sequence[Option]) -> list[tuple[str, ...]]:
    return [
        (
            f"`{name}`",
            _escaped(values),
            default if default in ("", "required") else f"`{default}`",
            _escaped(what),
        )
        for name, values, default, what in option_rows(found)
    ]


def _escaped(text: str) -> str:
    return text.replace("|", r"\|")


if __name__ == "__main__":
    print(page(), end="")
