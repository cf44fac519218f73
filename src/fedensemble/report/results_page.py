"""Gathers reproduced tables and figures into one page."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..checkpoint import write_bytes
from ..errors import InputError, StoreError
from ..experiment.paper_table import NAMES
from ..experiment.read_json import need_keys, read_table
from .figures.paper_grid import FULL

BEGIN, END = "<!-- reproduced: begin -->", "<!-- reproduced: end -->"


def collect(folder: Path, page: Path) -> list[str]:
    """Puts every table in a folder into a page, between its two marks, and the pictures into
    images/ beside it.

    A table takes the place of the section with its title; sections of other tables stay as they
    are.

    Returns:
        the names that were found.
    """
    found = {
        path.parent: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*/table.md"))
    }
    if not found:
        raise InputError(f"There are no tables in {folder}: run `fedensemble reproduce all` first.")
    for text in found.values():
        check_page(page, _scale(text))
    before, sections, after = _read(page)
    titles: dict[str, Path] = {}
    for place in sorted(found, key=lambda place: (_rank(found[place]), place.name)):
        title = _title(found[place])
        if title in titles:
            raise InputError(
                f"{titles[title]} and {place} have the same title ({title}): change one."
            )
        titles[title] = place
        _put(_section(place, found[place], page), sections)
    body = "".join(f"{section}\n\n" for section in sections)
    write_bytes(page, f"{before}{BEGIN}\n\n{body}{END}{after}".encode())
    return [place.name for place in titles.values()]


def check_page(page: Path, scale: str) -> None:
    """Raises if a page has tables of another scale, which tables of this one are not to stand
    among.
    """
    others = {_scale(section) for section in _read(page)[1] if _command(section)} - {scale}
    if others:
        raise InputError(
            f"{page} has tables of scale {' and '.join(sorted(others))}, and those of scale {scale} are not to be "
            "taken for them: --collect into another page."
        )


def _read(page: Path) -> tuple[str, list[str], str]:
    """A page before its first mark, the sections between the marks, and the page after them."""
    old = page.read_text(encoding="utf-8") if page.is_file() else f"# Results\n\n{BEGIN}\n{END}\n"
    if BEGIN not in old:
        old = f"{old.rstrip()}\n\n{BEGIN}\n{END}\n"
    before, _, rest = old.partition(BEGIN)
    between, found, after = rest.partition(END)
    if not found:
        raise StoreError(f"{page} has the mark {BEGIN} but not {END} after it.")
    sections = [
        section.strip("\n") for section in re.split(r"^(?=## )", between, flags=re.MULTILINE)
    ]
    return before, [section for section in sections if section], after


def _section(folder: Path, text: str, page: Path) -> str:
    """A table with its pictures beside the page, and what it cost."""
    for picture in sorted(folder.glob("*.png")):
        kept = page.parent / "images" / f"{folder.name}-{picture.name}"
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(picture, kept)
        text = text.replace(f"]({picture.name})", f"](images/{kept.name})")
    results = read_table(folder / "results.json")
    need_keys(
        folder / "results.json",
        results,
        ("sittings", "minutes") if results.get("sittings") else ("sittings",),
    )
    return f"{text}\n{_cost(results)}"


def _put(section: str, sections: list[str]) -> None:
    """Puts a section where the one with its title is, or before the first that comes after it in
    the paper.
    """
    titles = [_title(other) for other in sections]
    if _title(section) in titles:
        sections[titles.index(_title(section))] = section
        return
    later = [place for place, other in enumerate(sections) if _rank(other) > _rank(section)]
    sections.insert(later[0] if later else len(sections), section)


def _title(section: str) -> str:
    return section.partition("\n")[0]


def _command(section: str) -> Sequence[str]:
    """The words of the command that made a table; none for a text of another kind."""
    found = re.findall(r"^`(fedensemble reproduce .+)`$", section, re.MULTILINE)
    return shlex.split(found[-1]) if found else ()


def _scale(section: str) -> str:
    words = _command(section)
    return words[words.index("--scale") + 1] if "--scale" in words else FULL


def _rank(section: str) -> tuple[int, str]:
    """Where a table stands: those of the paper in its order, then others by name."""
    words = _command(section)
    name = Path(words[2]).stem if words else ""
    return (NAMES.index(name), "") if name in NAMES else (len(NAMES), name)


def _cost(results: Mapping[str, Any]) -> str:
    """Where and how long it was trained."""
    sittings = results["sittings"]
    if not sittings:
        return "The runs are those of other tables."
    last = sittings[-1]
    samples = sum(sitting["samples"] for sitting in sittings)
    seconds = sum(sitting["seconds"] for sitting in sittings)
    return (
        f"Trained in {results['minutes']} minutes on {last['device']}: {samples:,} examples, "
        f"{samples / max(seconds, 1e-9):,.0f} a second, building and testing included; "
        f"torch {last['torch']}, Python {last['python']}."
    )
