"""`fedensemble predict` reads new files as training has read its own."""

import csv

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner

import fedensemble as fe
from fedensemble.cli.main import app
from fedensemble.data import load, read_images
from fedensemble.data.folders.encode_text import hash_words
from fedensemble.data.tables.encode import category_columns, encode_new_inputs
from fedensemble.data.tables.read import read_table

RNG = np.random.default_rng(0)
COLUMNS = ("age", "a=b", "flag", "x=y=z")


def invoke(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def train(folder, **data):
    settings_ = {f"data.{key}": value for key, value in data.items()}
    settings_ |= {"rounds": 1, "ensemble.modes": 2, "ensemble.clients_per_round": 2,
                  "data.clients": 2, "data.partition": "iid", "model.name": "mlp"}  # fmt: skip
    config = folder / "config.toml"
    lines = [f"{key} = {repr(value).replace('T', 't')}" for key, value in settings_.items()]
    config.write_text("\n".join(lines))
    done = invoke("run", config, "--out", folder / "run")
    assert done.exit_code == 0, done.output
    return folder / "run", fe.load_ensemble(folder / "run")


def predicted(run, path, out):
    """The rows of the table that is written."""
    done = invoke("predict", run, path, "-o", out)
    assert done.exit_code == 0, done.output
    with open(out, newline="") as file:
        return list(csv.DictReader(file))


def probabilities(rows, names):
    return np.array([[float(row[f"p({name})"]) for name in names] for row in rows])


rows_ = st.lists(
    st.tuples(
        st.integers(-9, 9), st.sampled_from(["u", "v", "w=1"]), st.booleans(),
        st.sampled_from(["p", "q"]),
    ),
    min_size=2, max_size=12,
)  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(rows=rows_, take=st.data(), encoding=st.sampled_from(["one-hot", "ordinal"]))
def test_rows_are_encoded_as_in_training(rows, take, encoding, tmp_path_factory):
    folder = tmp_path_factory.mktemp("t")
    lines = [f"{a},{b},{c},{d},{i % 2}" for i, (a, b, c, d) in enumerate(rows)]
    (folder / "t.csv").write_text("\n".join([",".join([*COLUMNS, "target"]), *lines]))
    options = {"target": "target", "test_share": 0, "encoding": encoding, "categorical": ["age"]}
    source = load("table", path=folder / "t.csv", **options)
    chosen = take.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=4))
    # Only some of the rows, without the target, in another order of columns.
    new = [f"{d},{c},{b},{a}" for a, b, c, d in (rows[row] for row in chosen)]
    (folder / "n.csv").write_text("\n".join([",".join(COLUMNS[::-1]), *new]))
    titles = source.feature_names
    categories = source.info.get("categories", {})
    assert bool(categories) == (encoding == "ordinal")
    text = {*category_columns(titles)} - {*titles} | {*categories}
    found = encode_new_inputs(read_table(folder / "n.csv", None, (), text), titles, categories)
    assert np.array_equal(found, source.x[chosen])


def test_tables(tmp_path):
    lines = [f"{RNG.normal():.3f},{'AB'[row % 2]},{'yn'[row % 3 == 0]}" for row in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["pulse,ward,ill", *lines]))
    run, ensemble = train(
        tmp_path, source="table", path=str(tmp_path / "t.csv"), target="ill", test_share=0
    )
    x = load("table", path=tmp_path / "t.csv", target="ill", test_share=0).x
    found = predicted(run, tmp_path / "t.csv", tmp_path / "p.csv")
    expected = ensemble.predict(x).mean.numpy()
    np.testing.assert_allclose(probabilities(found, ("n", "y")), expected, rtol=1e-4)
    for content, message in [
        ("pulse,ward\n1,C\n", "holds 'C' (line 2), which did not occur in training (A, B)"),
        ("pulse\n1\n", "unknown column 'ward'"),
        ("ward\nA\n", "unknown column 'pulse'"),
        ("pulse,ward\n1,A\n,B\n", "'pulse' 1 (the first in line 3)"),
        ("pulse,ward\nhigh,A\n", "holds the text 'high', and numbers in the training data"),
    ]:
        (tmp_path / "n.csv").write_text(content)
        done = invoke("predict", run, tmp_path / "n.csv", "-o", tmp_path / "p.csv")
        assert done.exit_code == 1 and message in str(done.exception), done.exception


def test_tables_with_numbered_categories(tmp_path):
    lines = [
        f"{RNG.normal():.3f},{'zxy'[row % 3]},{(2, 10)[row % 2]},{row % 4 == 0},{'yn'[row % 5 == 0]}"
        for row in range(200)
    ]
    (tmp_path / "t.csv").write_text("\n".join(["pulse,ward,bed,flag,ill", *lines]))
    options = {
        "path": str(tmp_path / "t.csv"),
        "target": "ill",
        "test_share": 0,
        "encoding": "ordinal",
        "categorical": ["bed"],
    }
    run, _ = train(tmp_path, source="table", calibration=0.2, server_share=0.2, **options)
    source = load("table", **options)
    assert source.info["categories"] == {"ward": ["x", "y", "z"], "bed": ["2", "10"]}
    for folder in (run, tmp_path / "one"):
        found = predicted(folder, tmp_path / "t.csv", tmp_path / "p.csv")
        expected = fe.load_ensemble(folder).predict(source.x).mean.numpy()
        np.testing.assert_allclose(probabilities(found, ("n", "y")), expected, rtol=1e-4)
        # Rows alone, in which other categories are missing, have the same numbers.
        (tmp_path / "n.csv").write_text("bed,flag,ward,pulse\n2,true,z,0.5\n")
        (row,) = predicted(folder, tmp_path / "n.csv", tmp_path / "p.csv")
        expected = fe.load_ensemble(folder).predict([[0.5, 2, 0, 1]]).mean.numpy()
        np.testing.assert_allclose(probabilities([row], ("n", "y")), expected, rtol=1e-4)
        # Files that are written from the modes keep the categories.
        if folder == run:
            for words in (("calibrate", run), ("distill", run, "-o", tmp_path / "one")):
                done = invoke(*words)
                assert done.exit_code == 0, done.output
    for content, message in [
        (
            "pulse,ward,bed,flag\n1,w,2,true\n",
            "holds 'w' (line 2), which did not occur in training",
        ),
        ("pulse,ward,bed,flag\n1,x,3,true\n", "'bed' of"),
        ("pulse,bed,flag\n1,2,true\n", "unknown column 'ward'"),
        ("pulse,ward,bed,flag\n1,,2,true\n", "'ward' 1 (the first in line 2)"),
    ]:
        (tmp_path / "n.csv").write_text(content)
        done = invoke("predict", run, tmp_path / "n.csv", "-o", tmp_path / "p.csv")
        assert done.exit_code == 1 and message in str(done.exception), done.exception


def test_images(tmp_path):
    for row in range(12):
        path = tmp_path / "pets" / ("cat", "dog")[row % 2] / f"{row}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(RNG.integers(0, 256, (6, 6 + row % 2, 3), dtype=np.uint8)).save(path)
    run, ensemble = train(
        tmp_path, source="images", path=str(tmp_path / "pets"), size=[4, 5], fit="crop"
    )
    found = predicted(run, tmp_path / "pets", tmp_path / "p.csv")
    names = [row["file"] for row in found]
    assert names == sorted(names) and len(names) == 12
    x = read_images([tmp_path / "pets" / name for name in names], (4, 5), "crop")
    expected = ensemble.predict(x).mean.numpy()
    np.testing.assert_allclose(probabilities(found, ("cat", "dog")), expected, rtol=1e-4)
    one = predicted(run, tmp_path / "pets" / names[3], tmp_path / "p.csv")
    assert one[0]["label_name"] == found[3]["label_name"] and one[0]["file"] == names[3][4:]
    done = invoke("predict", run, tmp_path / "pets", "-o", tmp_path / "p.npz")
    assert done.exit_code == 0 and np.load(tmp_path / "p.npz")["file_name"].tolist() == names
    (tmp_path / "none").mkdir()
    done = invoke("predict", run, tmp_path / "none", "-o", tmp_path / "p.csv")
    assert "has no images" in str(done.exception)


def test_documents(tmp_path):
    for row in range(12):
        path = tmp_path / "mails" / ("good", "bad")[row % 2] / f"{row}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{('fine', 'sad')[row % 2]} words {row}")
    run, ensemble = train(tmp_path, source="text", task="classify", path=str(tmp_path / "mails"))
    found = predicted(run, tmp_path / "mails", tmp_path / "p.csv")
    assert [row["file"] for row in found] == sorted(
        f"{kind}/{row}.txt" for row in range(12) for kind in [("good", "bad")[row % 2]]
    )
    texts = [(tmp_path / "mails" / row["file"]).read_text() for row in found]
    expected = ensemble.predict(hash_words(texts)).mean.numpy()
    np.testing.assert_allclose(probabilities(found, ("bad", "good")), expected, rtol=1e-4)


def test_runs_on_other_data_say_what_they_take(tmp_path):
    (tmp_path / "t.csv").write_text("a\n1\n")
    done = invoke("run", "--out", tmp_path / "run", "--set", "rounds=1")
    assert done.exit_code == 0
    done = invoke("predict", tmp_path / "run", tmp_path / "t.csv", "-o", tmp_path / "p.csv")
    assert "was trained on data.source = 'digits', and takes an .npz" in str(done.exception)
