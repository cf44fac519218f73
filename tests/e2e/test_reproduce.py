"""`fedensemble reproduce` as a user meets it; the toy, which needs no data and no time."""

from .command_line import run


def test_toy_figure_and_its_page(tmp_path):
    words = "reproduce figure-toy --scale smoke --device cpu --set rounds=20"
    code, _, errors = run(*words.split(), "--collect", "page.md", cwd=tmp_path)
    assert code == 0, errors
    (folder,) = (tmp_path / "reproduced" / "smoke").glob("figure-toy-*")
    assert {path.name for path in folder.iterdir()} == {
        "table.md",
        "table.csv",
        "table.tex",
        "runs.csv",
        "references.bib",
        "toy.png",
        "toy.pdf",
        "toy.svg",
        "runs.json",
        "results.json",
    }
    assert "Fed-ensemble, K = 40" in (tmp_path / "page.md").read_text()
    written = (folder / "table.md").read_bytes()
    code, said, errors = run(*words.split(), cwd=tmp_path)
    assert code == 0, errors
    assert "round" not in said.split("Figure")[0]  # nothing is trained twice
    assert (folder / "table.md").read_bytes() == written


def test_wrong_names_are_said(tmp_path):
    code, _, errors = run("reproduce", "table5", cwd=tmp_path)
    assert code == 2
    assert "did you mean 'table1'" in errors or "table1" in errors
