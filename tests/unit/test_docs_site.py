"""The site of the documentation: its pages link to each other, and describe all public names."""

import importlib.util
import sys
from pathlib import Path, PurePosixPath

import pytest

import fedensemble as fe

SITE = Path(__file__).parents[2] / "docs" / "site"


def script(name: str):
    """A module of the site, which is no package: the build runs in its folder."""
    spec = importlib.util.spec_from_file_location(name, SITE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def modules():
    names = ("docstrings", "api_pages", "pages")
    before = {name: sys.modules.get(name) for name in names}
    yield {name: script(name) for name in names}
    for name, module in before.items():
        sys.modules.pop(name)
        if module:
            sys.modules[name] = module


@pytest.fixture
def repository(tmp_path):
    files = {
        "README.md": "# The package",
        "CONTRIBUTING.md": "# Contributing\n\n[a page](docs/how-to-x.md#two) [code](src/a.py)",
        "docs/how-to-x.md": "[rules](../CONTRIBUTING.md#style) [code](../src/a.py) ![p](images/p.png)\n"
        "[self](#two) [web](https://a.org/b.md) [start](../README.md) [gone](../gone.md) [all](../examples)",
        "docs/images/p.png": "pixels",
        "docs/part/README.md": "# Part\n\n[up](../how-to-x.md) [code](../../src/a.py)",
        "docs/site/conf.py": "",
        "src/a.py": "x = '```'\n",
        "examples/README.md": "# Examples\n\n[code](../src/a.py)",
        "examples/b/run.py": "print()\n",
        "examples/b/__pycache__/run.pyc": "",
    }
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def test_linked_files_become_pages(modules, repository):
    pages = modules["pages"].collect(repository)
    assert {str(path) for path in pages} == {
        *("how-to-x.md", "images/p.png", "part/README.md", "contributing.md"),
        *("files/src/a.py.md", "files/examples.md"),
    }
    page = pages[PurePosixPath("how-to-x.md")]
    assert "[rules](contributing.md#style) [code](files/src/a.py.md) ![p](images/p.png)" in page
    assert "[self](#two) [web](https://a.org/b.md) [start](index.md) [gone](../gone.md)" in page
    part = pages[PurePosixPath("part/README.md")]
    assert "[up](../how-to-x.md) [code](../files/src/a.py.md)" in part
    assert "toctree" in part and "toctree" not in page
    contributing = pages[PurePosixPath("contributing.md")]
    assert "[a page](how-to-x.md#two) [code](files/src/a.py.md)" in contributing


def test_files_are_shown_whole(modules, repository):
    pages = modules["pages"].collect(repository)
    # the fence is longer than any in the file
    assert "\n````python\nx = '```'\n````\n" in pages[PurePosixPath("files/src/a.py.md")]
    listing = pages[PurePosixPath("files/examples.md")]
    assert "## b/run.py\n\n```python\nprint()\n```" in listing and "pycache" not in listing


def test_writing_removes_old_pages_and_keeps_the_rest(modules, tmp_path):
    write = modules["pages"].write
    image = tmp_path / "p.png"
    image.write_bytes(b"pixels")
    old = {PurePosixPath("a.md"): "a", PurePosixPath("b/c.md"): "c", PurePosixPath("p.png"): image}
    write(old, tmp_path / "site")
    assert (tmp_path / "site" / "p.png").read_bytes() == b"pixels"
    before = (tmp_path / "site" / "a.md").stat().st_mtime_ns
    write({PurePosixPath("a.md"): "a"}, tmp_path / "site")
    assert (tmp_path / "site" / "a.md").stat().st_mtime_ns == before
    assert [path for path in (tmp_path / "site").rglob("*") if path.is_file()] == [
        tmp_path / "site" / "a.md"
    ]


def test_every_public_name_has_a_page(modules):
    pytest.importorskip("flwr")  # for fedensemble.deploy
    api = modules["api_pages"]
    pages = {str(path) for path in api.collect()}
    public = api.public_modules()
    assert {fe, fe.data, fe.testing, fe.uncertainty} <= set(public)
    homes = api.home_of_names()
    assert set(homes) == {(module.__name__, name) for module in public for name in module.__all__}
    assert {f"api/{home}.rst" for home in homes.values()} <= pages
    # `fedensemble` describes its own names, and other modules link there
    assert all(homes["fedensemble", name] == f"fedensemble.{name}" for name in fe.__all__)
    assert homes["fedensemble.algorithms", "FedProx"] == "fedensemble.FedProx"
    assert homes["fedensemble.algorithms", "FedMA"] == "fedensemble.algorithms.FedMA"


def test_public_names_have_docstrings(modules):
    pytest.importorskip("flwr")
    for module in modules["api_pages"].public_modules():
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value):
                assert value.__doc__ and value.__doc__.strip(), (module.__name__, name)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the length |w|, f(*args), a \\ b", r"the length \|w\|, f(\*args), a \\ b"),
        ("`a|b` and ``*args`` are code", "`a|b` and ``*args`` are code"),
        ("x_ and _x and a_name", r"x\_ and _x and a_name"),
    ],
)
def test_docstrings_are_plain_text(modules, text, expected):
    assert modules["docstrings"].as_rst([text]) == [expected]


def test_examples_in_docstrings_stay_as_they_are(modules):
    lines = [">>> f(*a) | b", "x_", "", "about |x|"]
    assert modules["docstrings"].as_rst(lines) == [*lines[:3], r"about \|x\|"]


def test_the_empty_line_that_ends_a_doctest_is_left_out(modules, repository):
    page = repository / "docs" / "how-to-y.md"
    page.write_text("# Y\n\n```pycon\n>>> 1\n1\n\n>>> 2\n2\n\n```\n\n```python\na = 1\n\n```\n")
    text = modules["pages"].collect(repository)[PurePosixPath("how-to-y.md")]
    assert text == "# Y\n\n```pycon\n>>> 1\n1\n\n>>> 2\n2\n```\n\n```python\na = 1\n\n```\n"
