"""Collects reproduced tables and figures in one page."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..checkpoint_file import write_bytes
from ..errors import InputError, StoreError
from ..experiment.storage.read_json import need_keys, read_table
from ..experiment.studies.paper_table import NAMES
from .figures.paper_grid import FULL

BEGIN, END = "<!-- reproduced: begin -->", "<!-- reproduced: end -->"


def collect(folder: Path, page: Path) -> list[str]:
    """Writes every table of a folder into a page; returns the names of the tables.

    The tables go between the two marks of the page, their figures into images/ next to it. A table
    replaces the section with its title; sections of other tables are not changed.
    """
    texts = {
        path.parent: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*/table.md"))
    }
    if not texts:
        raise InputError(f"There are no tables in {folder}: run `fedensemble reproduce all` first.")
    for text in texts.values():
        check_page(page, _scale(text))
    before, sections, after = _read(page)
    titles: dict[str, Path] = {}
    for place in sorted(texts, key=lambda place: (_rank(texts[place]), place.name)):
        title = _title(texts[place])
        if title in titles:
            raise InputError(
                f"{titles[title]} and {place} have the same title ({title}): change one."
            )
        titles[title] = place
        _insert(_section(place, texts[place], page), sections)
    body = "".join(f"{section}\n\n" for section in sections)
    write_bytes(page, f"{before}{BEGIN}\n\n{body}{END}{after}".encode())
    return [place.name for place in titles.values()]


def check_page(page: Path, scale: str) -> None:
    """Raises if a page has tables of another scale: tables of two scales must not be mixed."""
    others = {_scale(section) for section in _read(page)[1] if _command(section)} - {scale}
    if others:
        raise InputError(
            f"{page} has tables of scale {' and '.join(sorted(others))}, which must not be "
            f"mixed with tables of scale {scale}: --collect into another page."
        )


def _read(page: Path) -> tuple[str, list[str], str]:
    """The text before the first mark, the sections between the marks, and the text after them."""
    old = page.read_text(encoding="utf-8") if page.is_file() else f"# Results\n\n{BEGIN}\n{END}\n"
    if BEGIN not in old:
        old = f"{old.rstrip()}\n\n{BEGIN}\n{END}\n"
    before, _, rest = old.partition(BEGIN)
    between, end_mark, after = rest.partition(END)
    if not end_mark:
        raise StoreError(f"{page} has the mark {BEGIN} but not {END} after it.")
    sections = [
        section.strip("\n") for section in re.split(r"^(?=## )", between, flags=re.MULTILINE)
    ]
    return before, [section for section in sections if section], after


def _section(folder: Path, text: str, page: Path) -> str:
    """The section of a table: copies its figures next to the page and adds the training time."""
    for figure in sorted(folder.glob("*.png")):
        copied = page.parent / "images" / f"{folder.name}-{figure.name}"
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(figure, copied)
        text = text.replace(f"]({figure.name})", f"](images/{copied.name})")
    results = read_table(folder / "results.json")
    need_keys(
        folder / "results.json",
        results,
        ("sittings", "minutes") if results.get("sittings") else ("sittings",),
    )
    return f"{text}\n{_cost(results)}"


def _insert(section: str, sections: list[str]) -> None:
    """Replaces the section with the same title, or inserts the section in the paper's order."""
    titles = [_title(other) for other in sections]
    if _title(section) in titles:
        sections[titles.index(_title(section))] = section
        return
    later = [index for index, other in enumerate(sections) if _rank(other) > _rank(section)]
    sections.insert(later[0] if later else len(sections), section)


def _title(section: str) -> str:
    return section.partition("\n")[0]


def _command(section: str) -> Sequence[str]:
    """The words of the command that made a section; empty if no command did."""
    commands = re.findall(r"^`(fedensemble reproduce .+)`$", section, re.MULTILINE)
    return shlex.split(commands[-1]) if commands else ()


def _scale(section: str) -> str:
    words = _command(section)
    return words[words.index("--scale") + 1] if "--scale" in words else FULL


def _rank(section: str) -> tuple[int, str]:
    """The sort key of a section: tables of the paper in its order, then others by name."""
    words = _command(section)
    name = Path(words[2]).stem if words else ""
    return (NAMES.index(name), "") if name in NAMES else (len(NAMES), name)


def _cost(results: Mapping[str, Any]) -> str:
    """A sentence on where and how long the runs were trained."""
    sessions = results["sittings"]
    if not sessions:
        return "The runs are those of other tables."
    last = sessions[-1]
    samples = sum(session["samples"] for session in sessions)
    seconds = sum(session["seconds"] for session in sessions)
    return (
        f"Trained in {results['minutes']} minutes on {last['device']}: {samples:,} examples, "
        f"{samples / max(seconds, 1e-9):,.0f} per second, building and testing included; "
        f"torch {last['torch']}, Python {last['python']}."
    )
