"""`fedensemble reproduce` as a user meets it; the toy, which needs no data and no time."""

from .test_cli import fedensemble


def test_toy_figure_and_its_page(tmp_path):
    done = fedensemble(
        "reproduce",
        "figure-toy",
        "--scale",
        "smoke",
        "--device",
        "cpu",
        "--set",
        "rounds=20",
        "--collect",
        "page.md",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
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
    again = fedensemble(
        "reproduce",
        "figure-toy",
        "--scale",
        "smoke",
        "--device",
        "cpu",
        "--set",
        "rounds=20",
        cwd=tmp_path,
    )
    assert again.returncode == 0, again.stderr
    assert "round" not in again.stdout.split("Figure")[0]  # nothing is trained twice
    assert (folder / "table.md").read_bytes() == written


def test_wrong_names_are_said(tmp_path):
    done = fedensemble("reproduce", "table5", cwd=tmp_path)
    assert done.returncode == 2
    assert "did you mean 'table1'" in done.stderr or "table1" in done.stderr
