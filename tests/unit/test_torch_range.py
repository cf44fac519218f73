"""The range of torch versions is declared once, in pyproject.toml; everything else agrees with it."""

import re
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [Requirement(text) for text in project["dependencies"]]
    (specifier,) = [found.specifier for found in requirements if found.name == "torch"]
    return specifier


def oldest():
    (bound,) = [part.version for part in declared() if part.operator == ">="]
    return Version(bound)


def find(pattern, name):
    """The version that `pattern` finds in a file of the repository."""
    (found,) = re.findall(pattern, (ROOT / name).read_text(), re.MULTILINE)
    return Version(found)


def test_the_range_has_two_ends():
    assert {part.operator for part in declared()} == {">=", "<"}


def test_the_installed_torch_is_in_the_range():
    assert declared().contains(Version(torch.__version__).public, prereleases=True)


def test_the_pinned_torch_is_in_the_range():
    assert find(r"^torch==(\S+)$", "constraints.txt") in declared()


def test_make_test_torch_takes_the_oldest_by_default():
    """As a complete version, because `torch==2.8` is not the name of an environment."""
    default = find(r"^TORCH \?= (\d+\.\d+\.\d+)$", "Makefile")
    assert default == oldest()


def test_contributing_names_the_tested_versions():
    """The oldest first, and the pinned one among them."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    (line,) = re.findall(r"^Before a release, the tests run with torch .*$", page, re.MULTILINE)
    named = [Version(text) for text in re.findall(r"\d+\.\d+\.\d+", line)]
    assert named[0] == oldest() == min(named)
    assert find(r"^torch==(\S+)$", "constraints.txt") in named
    assert all(version in declared() for version in named)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_results_are_from_versions_in_the_range(page):
    named = re.findall(
        r"\b(?:torch|PyTorch) (\d+\.\d+(?:\.\d+)?)", page.read_text(encoding="utf-8")
    )
    assert [text for text in named if text not in declared()] == []
