"""Files for papers: one row per run, means, LaTeX, figures that scale, BibTeX."""

import csv
import re
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from fedensemble import FedAvg
from fedensemble.cli.commands.cite import cite
from fedensemble.config.schema import resolve
from fedensemble.core.algorithm import algorithms
from fedensemble.errors import InputError
from fedensemble.experiment.run import RunCallbacks
from fedensemble.experiment.studies.compare import RowResult, compare, make_comparison
from fedensemble.experiment.studies.paper_table import NAMES
from fedensemble.report.bibliography import _packaged, bibliography, reference_key
from fedensemble.report.comparison_report import write_comparison
from fedensemble.report.figures.plots import save_for_print
from fedensemble.report.tables.best import best_by_column, best_places
from fedensemble.report.tables.latex import escape, latex
from fedensemble.report.tables.result_table import TextTable
from fedensemble.report.tables.runs_table import means_table, numbers_of

ROOT = Path(__file__).parents[3]
BASE = {
    "name": "tiny",
    "rounds": 2,
    "data": {"source": "gaussians", "n": 40, "n_test": 20, "clients": 4},
    "model": {"name": "mlp", "hidden": [3]},
    "ensemble": {"modes": 2, "strata": 2, "clients_per_round": 2},
}


def read_csv(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(StringIO(text)))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[RowResult]]:
    """A comparison with a row that diverges, and the folder of all runs."""
    root = tmp_path_factory.mktemp("runs")
    rows = [
        ("a_1 & b", {"algorithm": {"lr": 0.1}}),
        ("prox", {"algorithm": {"name": "fedprox", "mu": 0.5}}),
        ("wild", {"algorithm": {"lr": 1e30}}),
    ]
    comparison = make_comparison("tiny", BASE, rows, [3, 8], "accuracy")
    results = compare(comparison, root, lambda label, seed: RunCallbacks(), lambda: None)
    write_comparison(root / "out", comparison, results, root)
    return root, results


def test_runs_have_one_row_per_seed_with_what_differs_between_them(written):
    root, results = written
    rows = read_csv((root / "out" / "runs.csv").read_text())
    assert [(row["method"], row["seed"], row["state"]) for row in rows] == [
        ("a_1 & b", "3", "done"),
        ("a_1 & b", "8", "done"),
        ("prox", "3", "done"),
        ("prox", "8", "done"),
        ("wild", "3", "diverged"),
        ("wild", "8", "diverged"),
    ]
    assert [row["algorithm.name"] for row in rows[::2]] == ["fedavg", "fedprox", "fedavg"]
    assert [row["algorithm.mu"] for row in rows[::2]] == ["", "0.5", ""]
    assert "rounds" in rows[0] and "ensemble.modes" not in rows[0]  # the same for all
    for row, summary in zip(
        rows, [s for result in results for s in result.summaries], strict=False
    ):
        for metric, value in summary["test"].items():
            assert float(row[metric]) == value, metric
        assert int(row["bytes_up"]) == summary["bytes_up"] > 0
        assert float(row["seconds"]) == summary["seconds"] and row["rounds"] == "2"
        assert (root / row["run"] / "summary.json").is_file()
    assert rows[4]["accuracy"] == rows[4]["seconds"] == ""


def test_means_and_deviations_are_columns_of_their_own(written):
    root, _ = written
    table = read_csv((root / "out" / "table.csv").read_text())
    runs = read_csv((root / "out" / "runs.csv").read_text())
    one, other = (float(row["nll"]) for row in runs[:2])
    assert float(table[0]["nll_mean"]) == pytest.approx((one + other) / 2)
    assert float(table[0]["nll_sd"]) == pytest.approx(abs(one - other) / 2**0.5)
    assert table[0]["seeds"] == "2"
    assert (table[2]["seeds"], table[2]["nll_mean"], table[2]["nll_sd"]) == ("0", "", "")
    single = means_table([RowResult("a", (), ({"test": {"mse": 0.25}, "seconds": 1.5},))])
    assert single.csv() == "method,seeds,mse_mean,mse_sd,seconds_mean,seconds_sd\na,1,0.25,,1.5,\n"


def test_only_numbers_become_columns():
    summary = {
        "test": {"accuracy": 0.5, "recall": [0.1, 0.9], "calibrated": True},
        "test_dropout": {"accuracy": 0.4},
        "rounds": 3,
        "name": "x",
    }
    assert numbers_of(summary) == {"accuracy": 0.5, "dropout_accuracy": 0.4, "rounds": 3}


def test_the_latex_table_is_whole_escaped_and_marks_the_best(written):
    root, _ = written
    text = (root / "out" / "table.tex").read_text()
    assert text.startswith("% needs \\usepackage{booktabs}\n")
    for begin, end in ((r"\begin{table}", r"\end{table}"), (r"\toprule", r"\bottomrule")):
        assert text.count(begin) == text.count(end) == 1
    lines = [line for line in text.splitlines() if line.endswith(r"\\")]
    columns = re.findall(r"\\begin\{tabular\}\{(.+)\}", text)[0]
    assert len(lines) == 4 and {len(re.findall(r"(?<!\\)&", line)) for line in lines} == {
        len(columns) - 1
    }
    assert r"a\_1 \& b" in text and r"accuracy \%" in text and r" $\pm$ " in text
    assert "±" not in text and set(lines[3].split(" & ")[1:-1]) == {"--"}
    means = [float(re.findall(r"[\d.]+", line.split(" & ")[4])[0]) for line in lines[1:3]]
    bold = [r"\textbf" in line.split(" & ")[4] for line in lines[1:3]]  # NLL: lower is better
    assert bold == [mean == min(means) != max(means) for mean in means]


def test_best_cells():
    assert best_places("accuracy", ["95.0 ± 9.0", "–", "96.0 ± 0.1", "96.0"]) == [2, 3]
    assert best_places("mse", ["0.2", "-0.3", "0.1"]) == [1]
    assert best_places("accuracy", ["95.0", "95.0"]) == []  # nothing to choose
    assert best_places("entropy", ["1", "2"]) == []  # neither high nor low is better
    table = TextTable(
        "",
        ("method", "accuracy %", "ECE %", "time, s"),
        (("a", "9", "9", "9"), ("b", "8", "8", "8")),
    )
    assert best_by_column(table) == {(0, 1), (1, 2)}


def test_latex_of_text_that_means_something_to_latex():
    assert escape("\\input{x}") == r"\textbackslash{}input\{x\}"
    table = TextTable("t", ("", "gap"), (("**x**", "-0.50"), ("y\n\\end{table}", "**1.00**")))
    text = latex(table, "my table!")
    assert r"\label{tab:my-table-}" in text and "$-$0.50" in text and r"\textbf{1.00}" in text
    assert text.count(r"\end{table}") == 1


def test_figures_are_saved_in_three_formats_with_the_same_bytes_each_time(tmp_path):
    contents = []
    for place in ("a", "b"):
        figure = Figure()
        figure.subplots().plot([1, 2], [3, 4], label="ensemble")
        save_for_print(figure, tmp_path / place / "curves.png")
        contents.append({p.name: p.read_bytes() for p in (tmp_path / place).iterdir()})
    assert contents[0] == contents[1]
    assert contents[0]["curves.png"].startswith(b"\x89PNG")
    assert (
        contents[0]["curves.pdf"].startswith(b"%PDF") and b"/Type3" not in contents[0]["curves.pdf"]
    )
    assert b"<svg" in contents[0]["curves.svg"]


def test_every_algorithm_of_the_package_has_an_entry():
    own = [n for n in algorithms if algorithms[n].__module__.startswith("fedensemble.")]
    keys = {reference_key(algorithms[name].reference) for name in own}
    assert keys == set(_packaged()) - {"shi2021"}  # and no entry is left over
    for key, entry in _packaged().items():
        surname, year = re.findall(r"author = \{(\w+), .*year = \{(\d{4})\}", entry, re.DOTALL)[0]
        assert re.fullmatch(f"{surname.lower()}{year}[b-z]?", key)
        assert entry.count("{") == entry.count("}") and entry.endswith(",\n}\n")


def test_the_paper_is_the_one_of_the_citation_file():
    title = re.findall(r'title: "(Fed-ensemble.+)"', (ROOT / "CITATION.cff").read_text())[0]
    assert title in re.sub(r"[{}]", "", bibliography())


def test_cited_are_the_algorithms_that_are_used(written, tmp_path):
    root, results = written

    def keys(text: str) -> list[str]:
        return re.findall(r"^@\w+\{(.+),$", text, re.MULTILINE)

    always = ["shi2021", "fedensemble"]
    assert keys((root / "out" / "references.bib").read_text()) == [*always, "mcmahan2017", "li2020"]
    assert keys(cite([])) == always
    assert keys(cite(["fedadam", "fedyogi"])) == [*always, "reddi2021"]  # one paper, one entry
    assert keys(cite([str(results[1].folders[0])])) == [*always, "li2020"]
    (tmp_path / "config.toml").write_text(resolve(BASE).toml().replace("fedavg", "scaffold"))
    assert keys(cite([str(tmp_path / "config.toml")])) == [*always, "karimireddy2020"]
    assert keys(cite([str(ROOT / "experiments" / "algorithms.toml")])) == keys(
        bibliography(
            dict.fromkeys(
                [
                    "fedavg",
                    "fedprox",
                    "fedavgm",
                    "fednova",
                    "fedadam",
                    "fedac",
                    "scaffold",
                    "feddyn",
                    "fedpd",
                    "fedsplit",
                    "qsgd",
                    "diana",
                    "ditto",
                    "ifca",
                    "fedem",
                    "dore",
                    "fedbe",
                    "pfnm",
                    "fedma",
                    "fedcross",
                    "fedsdd",
                    "anchored",
                    "svgd",
                ]
            )
        )
    )
    assert "li2020" in keys(cite(["table2-mnist"])) and "table2-mnist" in NAMES
    with pytest.raises(InputError, match=r"did you mean 'fedprox'.*TOML files, run folders"):
        cite(["fedprx"])


def test_another_packages_algorithm_is_cited_by_its_own_reference(monkeypatch):
    monkeypatch.setattr(algorithms, "_items", dict(algorithms._items))

    @algorithms.register("nova_2")
    @dataclass(frozen=True, kw_only=True)
    class Nova(FedAvg):
        reference = "Wang & others 2020"  # the key of FedMA's paper, and another paper

    @algorithms.register("plain")
    @dataclass(frozen=True, kw_only=True)
    class Plain(FedAvg):
        pass

    text = bibliography(["nova_2", "plain"])
    assert "@misc{nova-2,\n  title = {nova\\_2},\n  note = {Wang \\& others 2020},\n}" in text
    assert "Matched Averaging" not in text and "mcmahan2017" in text
