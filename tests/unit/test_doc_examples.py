"""Examples of the developers' pages run: shapes, a layer, an engine."""

import doctest
import re
from pathlib import Path
from unittest.mock import patch

import pytest

from fedensemble.core.engine import engines
from fedensemble.engines.stacked.handlers import HANDLERS
from fedensemble.testing import check_engine

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, language: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def test_shapes():
    page = "shapes.md"
    test = doctest.DocTestParser().get_doctest("\n".join(blocks(page, "pycon")), {}, page, page, 0)
    output: list[str] = []
    result = doctest.DocTestRunner().run(test, out=output.append)
    assert result.attempted > 20 and not result.failed, "".join(output)


def test_the_layer():
    handler, example = blocks("how-to-add-a-layer.md", "python")
    names: dict[str, object] = {"__name__": "layer"}
    with patch.dict(HANDLERS):
        exec(handler, names)
        exec(example, names)
        names["test_bilinear"]()


@pytest.mark.filterwarnings("ignore:The model cannot be batched layer by layer")
@pytest.mark.filterwarnings("ignore:There is a performance drop because")
def test_the_layer_needs_its_handler():
    _, example = blocks("how-to-add-a-layer.md", "python")
    names: dict[str, object] = {"__name__": "layer"}
    exec(example, names)
    with pytest.raises(AssertionError, match="the module uses a parameter in bilinear"):
        names["test_bilinear"]()


def test_the_engine():
    engine, check = blocks("how-to-add-an-engine.md", "python")
    assert 'check_engine("vmap")' in check
    assert "vector" in engines  # the built-in engines are imported now, not inside the patch
    with patch.dict(engines._items):
        exec(engine, {"__name__": "vmap_engine"})
        check_engine("vmap")
