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


def test_finished_runs_are_collected_without_their_device(tmp_path):
    words = ["reproduce", "figure-toy", "--scale", "smoke", "--set", "rounds=3"]
    code, _, errors = run(*words, "--device", "cpu", cwd=tmp_path)
    assert code == 0, errors
    (table,) = (tmp_path / "reproduced" / "smoke").glob("figure-toy-*/table.md")
    written = table.read_bytes()
    runs = sorted(path.name for path in (tmp_path / "runs").rglob("*"))
    table.unlink()
    code, _, errors = run(*words, "--device", "cpu", "--no-train", cwd=tmp_path)
    assert code == 0, errors
    assert table.read_bytes() == written
    # Runs of a device that this machine does not have are read as well; here there are none.
    words = ["reproduce", "table4", "--scale", "smoke", "--device", "cuda:7", "--no-train"]
    code, printed, errors = run(*words, cwd=tmp_path)
    assert code == 0, errors
    assert "–" in printed
    assert sorted(path.name for path in (tmp_path / "runs").rglob("*")) == runs


def test_wrong_names_are_said(tmp_path):
    code, _, errors = run("reproduce", "table5", cwd=tmp_path)
    assert code == 2
    assert "did you mean 'table1'" in errors or "table1" in errors
