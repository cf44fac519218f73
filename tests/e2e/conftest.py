"""Fixtures for tests of the command line."""

from pathlib import Path

import pytest

from .test_cli import SMALL


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a small config."""
    (tmp_path / "small.toml").write_text(SMALL.format(rounds=3))
    return tmp_path
