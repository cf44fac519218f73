"""The notebooks of the documentation run; the site shows what they print."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
CELL = re.compile(r"^```\{code-cell\} python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NOTEBOOKS = sorted(page for page in DOCS.glob("*.md") if "file_format: mystnb" in page.read_text())


@pytest.mark.parametrize("page", NOTEBOOKS, ids=lambda page: page.stem)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own, when it loads a .pt2 file
def test_cells(page, tmp_path, monkeypatch, capsys):
    import matplotlib.pyplot as plt

    plt.switch_backend("agg")
    monkeypatch.chdir(tmp_path)
    cells = CELL.findall(page.read_text(encoding="utf-8"))
    assert len(cells) >= 5
    names: dict[str, object] = {"__name__": "notebook"}
    for number, cell in enumerate(cells, 1):
        exec(compile(cell, f"{page.name}, cell {number}", "exec"), names)
    plt.close("all")
    assert capsys.readouterr().out  # what readers see


def test_there_are_three():
    assert len(NOTEBOOKS) == 3
