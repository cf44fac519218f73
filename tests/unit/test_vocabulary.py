"""Docs, docstrings, comments and messages use the field's words, not words readers must translate."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The word, and what to say instead.
BANNED = {
    r"slopes?": "gradient",
    r"sittings?": "benchmark session",
    r"(?:the|a|larger|one) card": "GPU",
    r"by numbers": "data-dependent control flow",
    r"filler": "padding",
    r"forth and back": "forward and backward",
    r"aloud": "with a warning",
    r"anew": "again",
    r"slip of the pen": "typo",
    r"(?:ms|rounds?|clients?|bytes|classes) an? (?:round|visit|client|step|iteration)": "per",
}
PATTERN = re.compile(r"(?<![\w`\"'])(?:" + "|".join(BANNED) + r")(?![\w`\"'(=])", re.IGNORECASE)
# Keys of files and options that keep an old word, because old files must still be read.
ALLOWED = {"src/fedensemble/report/reproduction_report.py": "sittings"}


def pages() -> list[Path]:
    source = [*sorted((ROOT / "src").rglob("*.py")), *sorted((ROOT / "src").rglob("*.toml"))]
    return [*source, *sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_words(page):
    name = str(page.relative_to(ROOT))
    found = [
        f"{name}:{number}: '{match[0]}'"
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        for match in PATTERN.finditer(line)
        if ALLOWED.get(name) != match[0]
    ]
    assert not found


def test_the_pattern_finds_what_it_should():
    assert PATTERN.search("The slope of the filters") and PATTERN.search("two classes a client")
    assert not PATTERN.search("a discard pile, one hundred numbers, two classes per client")
