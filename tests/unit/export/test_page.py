"""The examples of docs/how-to-export.md run."""

import doctest
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "how-to-export.md"
pytest.importorskip("onnxruntime")


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own, when it loads a .pt2 file
def test_examples(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```pycon\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, PAGE.name, str(PAGE), 0)
    said: list[str] = []
    result = doctest.DocTestRunner().run(test, out=said.append)
    assert result.attempted > 15 and not result.failed, "".join(said)
