"""The report page as a document: well formed, whole, safe, and in need of nothing else."""

import json
import math
import re
import shutil
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fedensemble.errors import InputError, StoreError
from fedensemble.report.html import write_page
from fedensemble.report.html.comparison_data import ComparisonData
from fedensemble.report.html.comparison_sections import comparison_sections
from fedensemble.report.html.svg import ticks
from fedensemble.report.palette import DARK, LIGHT
from fedensemble.report.tables.result_table import TextTable

SVG = "{http://www.w3.org/2000/svg}"
SECTIONS = {"curves", "spread", "calibration", "clients", "communication", "results", "config"}


def read(page: Path) -> tuple[str, ElementTree.Element]:
    """The page's text, and its elements; the browser's parser is more lenient than this one."""
    text = page.read_text(encoding="utf-8")
    bare = re.sub(
        r"(?s)<script>.*?</script>", "<script></script>", text.removeprefix("<!DOCTYPE html>")
    )
    return text, ElementTree.fromstring(bare)


def charts(root: ElementTree.Element) -> dict[str, ElementTree.Element]:
    return {
        e.attrib["id"]: e for e in root.iter("svg") if "chart" in e.attrib.get("class", "").split()
    }


def test_every_run_has_a_whole_page(run_of_shape: Path, shape: str) -> None:
    text, root = read(write_page(run_of_shape))
    ids = [e.attrib["id"] for e in root.iter() if "id" in e.attrib]
    assert len(ids) == len(set(ids))
    assert set(ids) >= SECTIONS
    for link in root.iter("a"):
        assert link.attrib["href"].removeprefix("#") in ids
    for svg in root.iter("svg"):
        drawn = " ".join(
            e.attrib.get(name, "")
            for e in svg.iter()
            for name in ("d", "x", "y", "cx", "cy", "width")
        )
        assert not re.search(r"nan|inf|e[+-]\d", drawn), svg.attrib.get("id")
    for svg in charts(root).values():
        assert svg.find("title").text == svg.attrib["aria-label"]
        assert json.loads(svg.attrib["data-hover"])["kind"] in {"x", "bar", "point", "grid"}
    assert len(text) < 1_500_000
    assert ("Not finished" in text) == (shape in {"unfinished", "first-round"})


@pytest.mark.parametrize(
    ("shape_", "plots"),
    [
        (
            "usual",
            {
                "curve-accuracy",
                "curve-nll",
                "loss",
                "modes-last",
                "spread-disagreement",
                "spread-mutual-information",
                "calibration",
                "confidence",
                "entropy",
                "risk-coverage",
                "confusion",
                "clients",
                "ledger",
            },
        ),
        (
            "regression",
            {
                "curve-mse",
                "loss",
                "modes-last",
                "spread-variance",
                "predictions",
                "residuals",
                "spreads",
                "clients",
                "ledger",
            },
        ),
        (
            "one-mode",
            {
                "curve-accuracy",
                "curve-nll",
                "loss",
                "calibration",
                "confidence",
                "entropy",
                "risk-coverage",
                "confusion",
                "clients",
                "ledger",
            },
        ),
        ("no-test-set", {"loss", "clients", "ledger"}),
    ],
)
def test_plots(shape_: str, plots: set[str], make_run) -> None:
    from .conftest import SHAPES

    _, root = read(write_page(make_run(f"plots-{shape_}", **SHAPES[shape_])))
    assert set(charts(root)) == {f"plot-{name}" for name in plots}


def test_numbers_are_the_runs(make_run) -> None:
    folder = make_run("numbers")
    text, root = read(write_page(folder))
    found = json.loads((folder / "predictions.json").read_text())
    grid = json.loads(charts(root)["plot-confusion"].attrib["data-hover"])
    assert grid["counts"] == found["confusion"] and sum(map(sum, grid["counts"])) == 200
    assert sum(found["calibration"]["count"]) == 200
    assert sum(found["entropy"]["right"]) == sum(found["confusion"][c][c] for c in range(4))
    tested = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][-1]
    curve = json.loads(charts(root)["plot-curve-accuracy"].attrib["data-hover"])
    assert [name for name, _ in curve["rows"]] == ["ensemble", "mode 0", "mode 1", "mode 2"]
    last = [values[-1] for _, values in curve["rows"]]
    assert last == [
        f"{100 * v:.1f}" for v in (tested["test"]["accuracy"], *tested["modes"]["accuracy"])
    ]
    held = json.loads((folder / "clients.json").read_text())["counts"]
    assert json.loads(charts(root)["plot-clients"].attrib["data-hover"])["counts"] == [
        list(x) for x in zip(*held, strict=True)
    ]
    assert (
        "240.0 kB" in text
        and (folder / "config.toml").read_text().splitlines()[0].replace('"', "&#34;") in text
    )


def test_many_tests_are_averaged_and_said_so(make_run) -> None:
    text, root = read(write_page(make_run("averaged", rounds=700, modes=5)))
    for name in ("curve-accuracy", "curve-nll", "spread-disagreement"):
        hover = json.loads(charts(root)[f"plot-{name}"].attrib["data-hover"])
        # 140 tests, 3 at a time
        assert len(hover["at"]) == 47 and hover["label"][-1] == "round 700"
    assert text.count("Each point is the mean of the 3 tests up to it.") == 4
    assert "mean of the" not in read(write_page(make_run("not-averaged")))[0]


def test_bars_of_few_examples_are_faint(make_run) -> None:
    folder = make_run("faint")
    found = json.loads((folder / "predictions.json").read_text())
    counts = found["calibration"]["count"]
    few = [n for n in counts if 0 < n < 10]
    assert few and any(n >= 10 for n in counts)
    text, root = read(write_page(folder))
    chart = charts(root)["plot-calibration"]
    bars = [e.attrib["class"] for e in chart.iter("rect")]
    rates = zip(counts, found["calibration"]["accuracy"], strict=True)
    assert bars.count("bar c0 l2") == sum(0 < n < 10 and a > 0 for n, a in rates)
    assert "fewer than 10 examples" in text
    assert any(
        f"examples: {few[0]}" in said for said in json.loads(chart.attrib["data-hover"])["text"]
    )


def _lab(color: str) -> tuple[float, float, float]:
    """CIELAB, in which distances are about those an eye sees."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    seen = (
        0.4339 * red + 0.3762 * green + 0.1899 * blue,
        0.2126 * red + 0.7152 * green + 0.0722 * blue,
        0.0177 * red + 0.1095 * green + 0.8728 * blue,
    )
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in seen)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_colours_can_be_told_apart(make_run) -> None:
    text, _ = read(write_page(make_run("told-apart")))
    pairs = re.findall(r"--c\d: light-dark\((#\w{6}), (#\w{6})\);", text)
    assert pairs == list(zip(LIGHT, DARK, strict=True)) and len(pairs) == 7
    for scheme in (LIGHT, DARK):
        assert min(math.dist(_lab(a), _lab(b)) for a, b in combinations(scheme, 2)) > 35


def test_large_runs_stay_bounded(make_run) -> None:
    folder = make_run("bounded", classes=150, clients=300)
    found = json.loads((folder / "predictions.json").read_text())
    assert len(found["confusion"]) == 100 and found["labels"][-1] == "others"
    assert sum(map(sum, found["confusion"])) == 200
    clients = json.loads((folder / "clients.json").read_text())
    assert len(clients["counts"]) == 200 and clients["clients"] == 300
    assert all(sum(line) == 20 for line in clients["counts"])
    assert "The first 200 of 300 clients." in read(write_page(folder))[0]


def test_text_of_users_stays_text(make_run) -> None:
    evil = '</pre><script>alert(1)</script><img src="x" onerror="alert(2)">'
    folder = make_run("evil", names=tuple(f"{evil}\"'{client}" for client in range(8)))
    config = folder / "config.toml"
    config.write_text(config.read_text().replace('source = "digits"', f"source = '''{evil}'''"))
    text, root = read(write_page(folder))
    assert "onerror" in text and "<img" not in text
    assert len(list(root.iter("script"))) == 1 and text.count("<script") == 1
    assert not [name for e in root.iter() for name in e.attrib if name.startswith("on")]


def test_needs_nothing_from_elsewhere(run_of_shape: Path, comparison: Path) -> None:
    for folder in (run_of_shape, comparison):
        text, root = read(write_page(folder))
        addresses = [
            e.attrib[name] for e in root.iter() for name in ("src", "href") if name in e.attrib
        ]
        assert all(a.startswith(("#", "data:")) or not re.match(r"\w+:|//", a) for a in addresses)
        urls = set(re.findall(r"https?://[^\s\"'<]+", text))
        assert urls <= {"http://www.w3.org/2000/svg"}  # a namespace's name, which nobody fetches
        assert "@import" not in text and "url(" not in text.replace("url(#clip-", "")


def test_small_clients_are_as_visible_as_large_ones(make_run) -> None:
    folder = make_run("unequal", clients=2, classes=2)
    clients = json.loads((folder / "clients.json").read_text())
    clients |= {"counts": [[900, 100], [1, 9]], "size": [1000, 10]}
    (folder / "clients.json").write_text(json.dumps(clients))
    text, root = read(write_page(folder))
    cells = {
        e.attrib["class"]: e.attrib["d"].count("M")
        for e in charts(root)["plot-clients"].iter("path")
    }
    assert cells == {"cell c0 l10": 2, "cell c0 l1": 2}  # 90 % and 10 % at both clients
    assert "share of the client" in text


def test_the_spread_of_a_regression_is_no_interval(make_run) -> None:
    folder = make_run("no-interval", task="regression")
    found = json.loads((folder / "predictions.json").read_text())
    found["points"] = {"target": [0.0, 0.0, 0.0, 0.0], "mean": [0, 1, 2, 3], "spread": [1] * 4}
    (folder / "predictions.json").write_text(json.dumps(found))
    text = read(write_page(folder))[0]
    assert text.count("The spread of the modes is not a prediction interval.") == 3
    assert "Prediction ± 1.96 spreads contains 50 % of these targets" in text
    single = read(write_page(make_run("no-spread", task="regression", modes=1)))[0]
    assert "prediction interval" not in single


def test_runs_trained_together_are_marked(make_run) -> None:
    folder = make_run("together")
    assert "share of a batch" not in read(write_page(folder))[0]
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"trained_together": 12}))
    assert "training time, share of a batch of 12 runs" in read(write_page(folder))[0]


def test_legends_know_their_lines(make_run) -> None:
    """Lines without an entry of their own, as those of many modes, belong to the one before."""
    _, root = read(write_page(make_run("series", modes=80)))
    drawn = [e.attrib.get("data-series") for e in charts(root)["plot-curve-accuracy"].iter("path")]
    assert drawn.count("0") == 80 and drawn.count("1") == 1


def test_a_method_named_after_the_paper_is_no_result_of_the_paper() -> None:
    """Only a line of published results makes the heading claim a comparison with the paper."""
    for cells, title in (
        (("the paper's schedule", "91.5"), "Results"),
        (("MNIST", "paper", "91.5"), "Results against the paper"),
    ):
        table = TextTable("a", ("", "evaluation", "accuracy %")[-len(cells) :], (cells,))
        data = ComparisonData("a", "", "accuracy", table, rows=())
        assert comparison_sections(data, Path("a.html"))[0].title == title


def test_comparison(comparison: Path, tmp_path: Path) -> None:
    text, root = read(write_page(comparison))
    assert "Results against the paper" in text and "91.5 ± 0.2" in text
    assert set(charts(root)) == {"plot-curve", "plot-last"}
    assert "band: one standard deviation" in text
    (best,) = [e for e in root.iter("tr") if e.attrib.get("class") == "best"]
    assert "".join(best.itertext()).startswith("<b>Fed-ensemble</b>")
    assert "&lt;b&gt;Fed-ensemble&lt;/b&gt;" in text and "<b>" not in text
    hover = json.loads(charts(root)["plot-last"].attrib["data-hover"])
    assert (
        len(hover["text"]) == 4
        and "paper 91.50" in hover["text"][0]
        and "paper" not in hover["text"][2]
    )
    assert not [e for e in root.iter("a") if e.attrib["href"].endswith("report.html")]
    write_page(comparison.parent / "k1-0")
    _, again = read(write_page(comparison))
    assert [e.attrib["href"] for e in again.iter("a") if "report" in e.attrib["href"]] == [
        "../k1-0/report.html"
    ]
    (tmp_path / "elsewhere").mkdir()
    _, far = read(write_page(comparison, tmp_path / "elsewhere" / "page.html"))
    (link,) = [e.attrib["href"] for e in far.iter("a") if "report" in e.attrib["href"]]
    assert (tmp_path / "elsewhere" / link).resolve() == (
        comparison.parent / "k1-0" / "report.html"
    ).resolve()


def test_comparison_that_was_moved_or_lost_its_runs(comparison: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(comparison.parent, moved / "digits")
    listed = json.loads((comparison / "runs.json").read_text())
    folder = moved / "digits" / comparison.name
    lost = {
        label: [str(Path("gone", *Path(p).parts[-2:])) for p in places]
        for label, places in listed.items()
    }
    (folder / "runs.json").write_text(json.dumps(lost))
    assert len(charts(read(write_page(folder))[1])) == 2
    shutil.rmtree(moved / "digits" / "k1-0")
    assert "1 of the runs are not found" in read(write_page(folder))[0]
    (folder / "runs.json").unlink()
    assert "91.5" in read(write_page(folder))[0]


def test_table_with_rows_and_columns(comparison: Path, tmp_path: Path) -> None:
    """As `reproduce` writes them: a table for people in table.md, numbers in table.csv, folders in
    results.json.
    """
    run = next(comparison.parent.glob("k3-*"))
    (tmp_path / "table.md").write_text(
        "## Table 9: <i>toy</i>\n\n|  | evaluation | A |\n| --- | --- | ---: |\n| iid | standard | **91.00** |\n"
        "| iid | paper | 92.5 |\n\n![p](table.png)\n\nA remark.\n"
    )
    (tmp_path / "table.png").write_bytes(b"\x89PNG")
    (tmp_path / "table.csv").write_text(
        "row,column,metric,evaluation,mean,standard deviation,seeds,paper\niid,A,accuracy,standard,0.91,0,1,92.5\n"
    )
    cell = {"row": "iid", "column": "A", "skipped": "", "folders": [str(run)]}
    cells = [cell, {"row": "iid", "column": "B"}, {**cell, "row": "not iid"}]
    (tmp_path / "results.json").write_text(json.dumps({"cells": cells}))
    text, root = read(write_page(tmp_path))
    assert "Table 9: &lt;i&gt;toy" in text and "<td>91.00</td>" in text and "A remark." in text
    assert [e.attrib["src"] for e in root.iter("img")] == ["data:image/png;base64,iVBORw=="]
    assert "paper 92.50" in json.loads(charts(root)["plot-last"].attrib["data-hover"])["text"][0]
    # by row of the table
    assert set(charts(root)) == {"plot-curve", "plot-curve-2", "plot-last", "plot-last-2"}
    assert [e.text for e in charts(root)["plot-last-2"].iter("text")][-1] == "A"
    assert "Last test of every run: not iid" in text
    (tmp_path / "results.json").write_text(json.dumps({"cells": cells, "scale": "smoke"}))
    text, root = read(write_page(tmp_path))
    assert "<td>92.5</td>" in text  # in the table as before, but beside made-up data in no picture
    assert "paper" not in json.loads(charts(root)["plot-last"].attrib["data-hover"])["text"][0]


def test_what_is_no_run_is_refused(make_run, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="neither a run"):
        write_page(tmp_path)
    with pytest.raises(InputError, match="no folder"):
        write_page(tmp_path / "absent")
    (tmp_path / "table.csv").write_text("")
    with pytest.raises(StoreError, match="empty"):
        write_page(tmp_path)
    folder = make_run("damaged")
    (folder / "predictions.json").write_text("{")
    with pytest.raises(StoreError, match=r"predictions\.json"):
        write_page(folder)
    (folder / "predictions.json").unlink()
    (folder / "clients.json").unlink()  # an older run has neither, and has a page all the same
    assert "made without predictions.json" in read(write_page(folder))[0]


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0.931, 0.934), (-3, 1e6), (99.95, 100), (1e-9, 2e-9)]
)
def test_ticks_lie_inside(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 2 <= len(found) <= 6
    assert all(low <= tick <= high for tick in found) and found == sorted(set(found))


def test_a_number_that_is_none_breaks_the_line(make_run) -> None:
    folder = make_run("gap")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines[3] = json.dumps(json.loads(lines[3]) | {"loss": float("nan")})
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    _, root = read(write_page(folder))
    (line,) = [
        e for e in charts(root)["plot-loss"].iter("path") if "line" in e.attrib["class"].split()
    ]
    assert line.attrib["d"].count("M") == 2 and "nan" not in line.attrib["d"]


def test_a_run_of_an_earlier_version_has_no_risk_coverage_curve(make_run) -> None:
    folder = make_run("earlier")
    file = folder / "predictions.json"
    content = json.loads(file.read_text())
    del content["selective"]
    file.write_text(json.dumps(content))
    plots = set(charts(read(write_page(folder))[1]))
    assert "plot-calibration" in plots and "plot-risk-coverage" not in plots
