"""Tables from CSV and Parquet files, against pandas."""

import builtins
import gzip

import numpy as np
import pandas as pd
import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import fedensemble as fe
from fedensemble.cli.main import app
from fedensemble.config.build import build_data
from fedensemble.config.schema import resolve
from fedensemble.data import load, partition
from fedensemble.data.tables.columns import MISSING
from fedensemble.data.tables.csv_file import read_csv
from fedensemble.errors import DataError, InputError


def patients(n=60, seed=0):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "age": rng.integers(20, 90, n),
            "color": rng.choice(["red", "green", "blue"], n),
            "pulse": rng.normal(70, 10, n).round(2),
            "smoker": rng.random(n) < 0.5,
            "site": rng.choice(["north", "south", "west"], n),
        }
    )
    return frame.assign(risk=np.where(frame.age > 55, "high", "low"))


@pytest.fixture(params=["csv", "csv.gz", "tsv", "parquet"])
def write(request, tmp_path):
    """Writes a frame in one of the formats; returns the path."""

    def to_file(frame, name="t"):
        path = tmp_path / f"{name}.{request.param}"
        if request.param == "parquet":
            frame.to_parquet(path)
        else:
            frame.to_csv(path, index=False, sep="\t" if request.param == "tsv" else ",")
        return path

    return to_file


def test_every_format_is_what_pandas_makes_of_it(write):
    frame = patients()
    data = load("table", path=write(frame), target="risk", client="site", test_share=0)
    expected = pd.get_dummies(frame[["age", "color", "pulse"]], dtype=float)
    expected = expected.rename(columns=lambda name: name.replace("_", "="))
    expected["smoker"] = frame.smoker
    np.testing.assert_allclose(
        data.x, expected[list(data.feature_names)].to_numpy(float), rtol=1e-6
    )
    assert data.feature_names == (
        "age",
        "color=blue",
        "color=green",
        "color=red",
        "pulse",
        "smoker",
    )
    assert data.class_names == ("high", "low") and data.x_test is None
    assert np.array_equal(data.y, (frame.risk == "low").to_numpy(int))
    assert [data.group_names[g] for g in data.group] == frame.site.tolist()
    z = data.standardise(fe.data.convert.as_tensor(data.x), fe.data.convert.as_tensor(data.x).dtype)
    np.testing.assert_allclose(z[:, [0, 4]].mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(z[:, [0, 4]].std(0, correction=0), 1, rtol=1e-4)
    assert np.array_equal(z[:, [1, 2, 3, 5]], data.x[:, [1, 2, 3, 5]])


def test_natural_clients_and_their_test_rows(write):
    frame = patients(200)
    source = load("table", path=write(frame), target="risk", client="site")
    data = partition(source, "natural")
    assert data.names == ("north", "south", "west")
    assert len(data.x) == 160 and len(data.x_test) == 40
    # stratified: each class has a fifth of its rows in the test set
    shares = np.bincount(data.y_test) / frame.risk.value_counts().sort_index().to_numpy()
    np.testing.assert_allclose(shares, 0.2, atol=0.01)
    counted = frame.site.value_counts()
    for client, name in enumerate(data.names):
        assert data.size[client] + int((data.test_owner == client).sum()) == counted[name]


def test_numbers_as_clients_are_in_the_order_of_numbers(write):
    frame = patients().assign(site=lambda f: np.arange(len(f)) % 11)
    data = load("table", path=write(frame), target="risk", client="site")
    assert data.group_names == tuple(map(str, range(11)))


@pytest.mark.parametrize("marks", [("train", "test"), ("False", "TRUE"), (0, 1)])
def test_a_column_marks_test_rows(write, marks):
    frame = patients().assign(part=[marks[row % 3 == 0] for row in range(60)])
    data = load("table", path=write(frame), target="risk", test_column="part", drop=["site"])
    assert len(data.x) == 40 and len(data.x_test) == 20
    assert "part" not in str(data.feature_names)
    is_test = np.arange(60) % 3 == 0
    np.testing.assert_allclose(data.x_test[:, 0], frame.age[is_test])


def test_a_file_of_test_rows_shares_categories_and_classes(write):
    frame, test = patients(), patients(20, seed=1).drop(columns="site")
    test["color"] = "violet"
    test.loc[0, "risk"] = "unknown"
    data = load(
        "table",
        path=write(frame),
        target="risk",
        client="site",
        test_file=write(test[test.columns[::-1]], "test"),  # columns in another order
    )
    assert data.class_names == ("high", "low", "unknown")
    assert "color=violet" in data.feature_names and len(data.x_test) == 20
    np.testing.assert_allclose(data.x_test[:, 0], test.age)
    assert data.test_group.tolist() == [-1] * 20 and set(data.group) == {0, 1, 2}
    assert any(
        "never occurs in training (unknown)" in note for note in partition(data, "natural").notes
    )


def test_whole_numbers_are_classes_and_fractions_quantities(write):
    frame = patients().assign(grade=lambda f: np.array([10, 2, 30])[np.arange(len(f)) % 3])
    graded = load("table", path=write(frame), target="grade", drop=["risk"])
    assert graded.class_names == ("2", "10", "30") and graded.classes == 3
    ordered = load(
        "table", path=write(frame), target="grade", class_names=["30", "10", "2", "1"], test_share=0
    )
    assert (
        np.array_equal(ordered.y, np.array([1, 2, 0])[np.arange(60) % 3]) and ordered.classes == 4
    )
    amount = load("table", path=write(frame), target="pulse", test_share=0)
    assert amount.classes is None and np.allclose(amount.y, frame.pulse)
    years = load("table", path=write(frame), target="age", regression=True, test_share=0)
    assert years.classes is None and years.y.tolist() == frame.age.tolist()
    scaled = load("table", path=write(frame), target="pulse", scale_target=True, test_share=0)
    np.testing.assert_allclose(
        scaled.y, (frame.pulse - frame.pulse.mean()) / frame.pulse.std(ddof=0), rtol=1e-4, atol=1e-5
    )
    note = rf"(pulse - {frame.pulse.mean():.8g}) / {frame.pulse.std(ddof=0):.8g}"
    assert scaled.notes == (f"Targets are standardised: {note}.",)
    assert "training may diverge" in years.notes[0] and not graded.notes
    assert partition(scaled, "iid", 3).notes == scaled.notes


def test_columns_and_encodings(write):
    path = write(patients())
    few = load("table", path=path, target="risk", columns=["pulse", "color"], encoding="ordinal")
    assert few.feature_names == ("pulse", "color") and set(few.x[:, 1]) == {0, 1, 2}
    coded = load("table", path=path, target="risk", columns=["smoker", "site"])
    assert coded.feature_names == ("smoker", "site=north", "site=south", "site=west")
    as_text = load(
        "table", path=path, target="smoker", columns=["age"], categorical=["age"], scale=False
    )
    assert all(name.startswith("age=") for name in as_text.feature_names)
    assert as_text.standardise is None and (as_text.x.sum(1) == 1).all()


cells = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False, width=32).map(str),
    st.integers(-(10**6), 10**6).map(str),
    st.sampled_from(["", "NA", "n/a", "?", " nan ", "null"]),
)
texts = st.text(
    st.characters(codec="utf-8", exclude_characters="\0", exclude_categories=["Cs", "Cc"]),
    max_size=6,
)


@settings(deadline=None, max_examples=150)
@given(rows=st.lists(st.tuples(cells, texts), min_size=1, max_size=20), quoted=st.booleans())
def test_cells_survive_csv(rows, quoted, tmp_path_factory):
    path = tmp_path_factory.mktemp("t") / "t.csv"
    frame = pd.DataFrame(rows, columns=["number", "text"])
    frame["text"] = "x" + frame["text"]  # never a number, never missing
    frame.to_csv(path, index=False, quoting=1 if quoted else 0)
    table = read_csv(path, None, (), ())
    expected = [np.nan if c.strip().lower() in MISSING else float(c) for c, _ in rows]
    np.testing.assert_array_equal(table.columns["number"].numbers, expected)
    text = table.columns["text"]
    assert [text.texts[code] for code in text.codes] == [t.strip() for t in frame["text"]]


def test_pieces_of_a_long_file_are_one_column(tmp_path, monkeypatch):
    monkeypatch.setattr("fedensemble.data.tables.csv_file.ROWS", 7)
    frame = patients(100).assign(late=["1"] * 99 + ["text"])
    frame.drop(columns="late").to_csv(tmp_path / "t.csv", index=False)
    data = load("table", path=tmp_path / "t.csv", target="risk", test_share=0)
    np.testing.assert_allclose(data.x[:, 0], frame.age)
    frame.to_csv(tmp_path / "late.csv", index=False)
    with pytest.raises(
        DataError, match=r"'late' .* mixes numbers such as 1 with text, 'text' in line 101"
    ):
        load("table", path=tmp_path / "late.csv", target="risk")


def test_missing_values(write):
    frame = patients().astype({"age": float})
    frame.loc[[3, 5], "age"] = np.nan
    frame.loc[7, "color"] = None
    path = write(frame)
    where = "row 3" if path.suffix == ".parquet" else "line 5"
    with pytest.raises(
        DataError, match=rf"by column: 'age' 2, 'color' 1 \(the first in {where}\). Fill"
    ):
        load("table", path=path, target="risk")
    kept = load("table", path=path, target="risk", missing="drop", test_share=0)
    assert len(kept.x) == 57 and kept.info["dropped_rows"] == 3
    assert kept.notes == ("3 of 60 rows have a missing value and are left out.",)
    without = load("table", path=path, target="risk", drop=["age", "color"], test_share=0)
    assert len(without.x) == 60


CSV = "age,color,site,risk\n30,red,A,low\n50,blue,B,high\n70,red,A,high\n"


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (CSV, {"target": "riskk"}, "unknown column 'riskk': did you mean 'risk'"),
        (CSV, {"client": "sight"}, "unknown column 'sight': did you mean 'site'"),
        (CSV, {"columns": ["ages"]}, "unknown column 'ages': did you mean 'age'"),
        (CSV, {"drop": ["colour"]}, "unknown column 'colour': did you mean 'color'"),
        (CSV, {"client": "risk"}, "target, client and test_column must be different"),
        (CSV, {"columns": ["age", "risk"]}, "needs columns for inputs besides target"),
        (CSV, {"test_column": "color"}, "'color' of .* marks test rows, and holds 'blue'. Write test"),
        (CSV, {"test_share": 0.5, "test_file": "x.csv"}, "set only one"),
        (CSV, {"test_share": 1.5}, "test_share"),
        (CSV, {"class_names": ["low"]}, r"'risk' of .* holds 'high' \(line 3\), which is not among"),
        (CSV, {"regression": True}, "'risk' of .* holds text, and regression = true"),
        (CSV, {"encoding": "hot"}, "encoding"),
        (CSV, {"delimiter": ";;"}, "delimiter must be one character"),
        (CSV.replace(",", ";"), {}, "has one column, 'age;color;site;risk'. .*delimiter = ';'"),
        (CSV + "1,2\n", {}, "line 5: 2 cells for 4 columns"),
        (CSV + "x,red,A,low\n", {}, "'age' of .* mixes numbers such as 30 with text, 'x' in line 5"),
        (CSV + "x,red,7,low\n", {"columns": ["site"], "categorical": ["age"]}, "'site' of .* mixes"),
        (CSV + "inf,red,A,low\n", {}, r"'age' of .* holds inf \(line 5\), which float32 cannot hold"),
        ("," + CSV.replace("\n", "\n1,").removesuffix("1,"), {}, "Column 1 of .* has no name. If it is the index"),
        (CSV.replace("color", "age"), {}, "Two columns of .* are called 'age'"),
        ("", {}, "is empty"),
        ("age,risk\n", {}, "has no rows below"),
        ("age,risk\n,a\n?,b\n", {"missing": "drop"}, "Every row of .* has a missing value"),
        (CSV.replace("A", " "), {"client": "site"}, "missing values, by column: 'site' 2"),
    ],
)  # fmt: skip
def test_mistakes(tmp_path, text, options, message):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises((DataError, InputError), match=message):
        load("table", **{"path": tmp_path / "t.csv", "target": "risk", "test_share": 0, **options})


def test_columns_that_are_not_used_may_be_mixed(tmp_path):
    (tmp_path / "t.csv").write_text(CSV + "9x,red,7,1\n")
    data = load("table", path=tmp_path / "t.csv", target="risk", drop=["age", "site"], test_share=0)
    assert data.x.shape == (4, 2) and data.class_names == ("1", "high", "low")


def test_other_files(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"needs the file no.csv, which is missing"):
        load("table", path="no.csv", target="y")
    (tmp_path / "t.xlsx").write_bytes(b"PK")
    with pytest.raises(DataError, match=r"must be a .csv, .tsv or .parquet file"):
        load("table", path=tmp_path / "t.xlsx", target="y")
    (tmp_path / "t.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match=r"is damaged or no Parquet file"):
        load("table", path=tmp_path / "t.parquet", target="y")
    (tmp_path / "t.csv").write_bytes(b"age,y\n\xff\xfe,1\n")
    with pytest.raises(DataError, match=r"cannot be read as a CSV file .*UTF-8"):
        load("table", path=tmp_path / "t.csv", target="y")
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(CSV.encode())[:-9])
    with pytest.raises(DataError, match=r"cannot be read as a CSV file"):
        load("table", path=tmp_path / "t.csv.gz", target="risk")
    pd.DataFrame({"when": pd.to_datetime(["2020-01-01"] * 3), "y": [0, 1, 0]}).to_parquet(
        tmp_path / "d.parquet"
    )
    with pytest.raises(DataError, match=r"'when' of .* holds values of type timestamp"):
        load("table", path=tmp_path / "d.parquet", target="y")
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match=r"pip install 'fedensemble\[table\]'"):
        load("table", path=tmp_path / "d.parquet", target="y")


def test_columns_that_differ_between_files_and_too_many_categories(tmp_path):
    patients().to_csv(tmp_path / "t.csv", index=False)
    patients().assign(age="old").to_csv(tmp_path / "u.csv", index=False)
    with pytest.raises(DataError, match=r"'age' holds numbers in .*t.csv and text in .*u.csv"):
        load("table", path=tmp_path / "t.csv", target="risk", test_file=tmp_path / "u.csv")
    many = pd.DataFrame({"zip": [f"z{row}" for row in range(300)], "y": [0, 1] * 150})
    many.to_csv(tmp_path / "v.csv", index=False)
    with pytest.raises(DataError, match=r"'zip' of .* holds 300 different texts"):
        load("table", path=tmp_path / "v.csv", target="y")
    load("table", path=tmp_path / "v.csv", target="y", encoding="ordinal")
    many["y"] = np.arange(300)
    many.to_csv(tmp_path / "v.csv", index=False)
    with pytest.raises(DataError, match=r"300 different whole numbers .* set regression = true"):
        load("table", path=tmp_path / "v.csv", target="y", encoding="ordinal")


def test_a_run_of_a_table_is_continued_reported_and_never_reused_for_changed_rows(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    frame = patients(120)
    frame.to_csv("p.csv", index=False)
    table = {"source": "table", "path": "p.csv", "target": "risk", "client": "site"}
    config = {"data": table, "rounds": 4, "ensemble": {"modes": 2, "clients_per_round": 2}}
    assert resolve(config).data["partition"] == "natural"
    data = build_data(resolve(config))
    assert data.recipe["path"] == "p.csv" and data.names == ("north", "south", "west")
    (tmp_path / "c.toml").write_text(tomli_w.dumps(config))

    for words in ("run c.toml --out r", "run r --set rounds=6", "report r"):
        assert CliRunner().invoke(app, words.split()).exit_code == 0
    page = (tmp_path / "r" / "report.html").read_text()
    assert "high" in page and "low" in page
    ensemble = fe.load_ensemble("r")
    assert ensemble.class_names == ("high", "low") and ensemble.feature_names[1] == "color=blue"
    by_class = fe.evaluate_classes(ensemble.predict(data.x_test), data.y_test)
    assert list(by_class) == ["high", "low"]
    assert fe.Federation.load("r").round == 6
    frame.assign(age=frame.age + 1).to_csv("p.csv", index=False)
    result = CliRunner().invoke(app, ["run", "c.toml", "--out", "r", "--set", "rounds=6"])
    assert "p.csv has changed since" in str(result.exception)


def test_saved_from_python_and_continued_by_its_recipe(tmp_path):
    path = tmp_path / "p.csv"
    patients(100).to_csv(path, index=False)
    data = partition(load("table", path=str(path), target="risk", client="site"), "natural")
    federation = fe.Federation("mlp", data, modes=2)
    federation.train(2)
    federation.save(tmp_path / "run")
    again = fe.Federation.load(tmp_path / "run")
    assert again.data.feature_names == data.feature_names and again.round == 2
