"""The list of changes has a section per release, the newest first, and one for the version."""

import re
from datetime import date
from pathlib import Path

from packaging.version import Version

from fedensemble.version import VERSION

CHANGES = Path(__file__).parents[2] / "CHANGELOG.md"


def test_releases_are_in_order_and_the_version_is_among_them():
    first, *releases = re.findall(r"^## (.+)$", CHANGES.read_text(encoding="utf-8"), re.MULTILINE)
    assert first == "Unreleased"
    parts = [re.fullmatch(r"(\d+\.\d+\.\d+) – (\d{4}-\d\d-\d\d)", each) for each in releases]
    assert all(parts), releases
    order = [(Version(part[1]), date.fromisoformat(part[2])) for part in parts]
    assert order == sorted(order, reverse=True)
    assert Version(VERSION) in [version for version, _ in order]
