"""Sweeps: which texts are several values, which rows they make, and what is refused."""

from pathlib import Path

import pytest

from fedensemble.config import sweep
from fedensemble.config.sweep import Sweep, cross, split_values
from fedensemble.errors import InputError
from fedensemble.experiment.studies.compare import read_comparison
from fedensemble.report.comparison_report import find_comparison

CONFIG = """
name = "small"
rounds = 2
[data]
source = "gaussians"
clients = 6
[model]
name = "mlp"
hidden = [4]
[ensemble]
clients_per_round = 3
strata = 3
modes = 3
"""
ROWS = """
base = "small.toml"
seeds = [0, 1]
[[row]]
label = "FedAvg"
[[row]]
label = "FedProx"
set = { "algorithm.name" = "fedprox", "algorithm.mu" = 1.0 }
"""
COLUMNS = """
[[column]]
label = "easy"
set = { "data.separation" = 8.0 }
[[column]]
label = "hard"
set = { "data.separation" = 0.5 }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(CONFIG)
    (tmp_path / "rows.toml").write_text(ROWS)
    (tmp_path / "grid.toml").write_text(ROWS + COLUMNS)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("0.1", ["0.1"]),
        (" 1 , 2 ", ["1", "2"]),
        ('"a,b"', ['"a,b"']),
        (r'"a\",b",c', [r'"a\",b"', "c"]),
        (r"'a\',b", [r"'a\'", "b"]),  # no escapes in single quotes
        ('{name="adam",beta1=0.9},sgd', ['{name="adam",beta1=0.9}', "sgd"]),
        ("[[1,2],[3]],[]", ["[[1,2],[3]]", "[]"]),
        ("[1,2", ["[1,2"]),  # never closed: one string
        ("1,,2", ["1", "", "2"]),
    ],
)
def test_commas_separate_values_but_not_inside_of_them(text, parts):
    assert split_values(text) == parts


def test_sweeps_make_the_product_and_are_labelled_by_their_keys(folder):
    settings = ["algorithm.lr=0.1,0.3", "rounds=7", "model.hidden=[4],[4,4]"]
    comparison = find_comparison(folder / "small.toml", settings, None, None, None, "5")
    assert [row.label for row in comparison.rows] == [
        "lr = 0.1, hidden = [4]",
        "lr = 0.1, hidden = [4,4]",
        "lr = 0.3, hidden = [4]",
        "lr = 0.3, hidden = [4,4]",
    ]
    configs = [row.configs[0] for row in comparison.rows]
    assert [config.algorithm["lr"] for config in configs] == [0.1, 0.1, 0.3, 0.3]
    assert [config.model["hidden"] for config in configs] == [[4], [4, 4], [4], [4, 4]]
    assert {config.rounds for config in configs} == {7} and comparison.seeds == (5,)


def test_text_is_labelled_without_quotes_and_equal_ends_with_the_whole_key(folder):
    settings = ['algorithm.name="fedavg",fedprox', "data.seed=1,2"]
    comparison = find_comparison(folder / "small.toml", settings, None, None, None, "0")
    assert comparison.rows[0].label == "algorithm = fedavg, seed = 1"
    rows = cross([], [Sweep("model.name", ("a",)), Sweep("data.model", ("b",))], seeds=1)
    assert rows[0][0] == "model.name = a, data.model = b"


def test_sweeps_multiply_with_other_options_and_with_the_rows_of_a_file(folder):
    comparison = find_comparison(
        folder / "small.toml", ["algorithm.lr=0.1,0.3"], "fedavg", "1,3", None, "0"
    )
    assert [row.label for row in comparison.rows] == [
        "fedavg, K = 1, lr = 0.1",
        "fedavg, K = 1, lr = 0.3",
        "fedavg, K = 3, lr = 0.1",
        "fedavg, K = 3, lr = 0.3",
    ]
    rows = read_comparison(folder / "rows.toml", ["algorithm.lr=0.1,0.3"]).rows
    assert [row.label for row in rows] == [
        "FedAvg, lr = 0.1",
        "FedAvg, lr = 0.3",
        "FedProx, lr = 0.1",
        "FedProx, lr = 0.3",
    ]
    assert rows[3].configs[1].algorithm["mu"] == 1.0 and rows[3].configs[1].algorithm["lr"] == 0.3


def test_a_sweep_overrides_the_rows(folder):
    """If a row won, two rows with other labels would be the same run."""
    text = ROWS.replace('label = "FedAvg"', 'label = "FedAvg"\nset = { "algorithm.lr" = 0.5 }')
    (folder / "rows.toml").write_text(text)
    rows = read_comparison(folder / "rows.toml", ["algorithm.lr=0.1,0.3"]).rows
    assert [row.configs[0].algorithm["lr"] for row in rows] == [0.1, 0.3, 0.1, 0.3]


def test_an_option_that_a_swept_algorithm_does_not_accept_is_an_error(folder):
    sweeps = ["algorithm.mu=0.1,1.0", "algorithm.name=fedavg,fedprox"]
    for settings in (sweeps, sweeps[::-1]):
        with pytest.raises(InputError, match="unknown key 'mu'"):
            find_comparison(folder / "small.toml", settings, None, None, None, "0")


def test_rows_of_a_comparison_file_combine_with_its_columns(folder):
    comparison = read_comparison(folder / "grid.toml")
    assert [row.label for row in comparison.rows] == [
        "FedAvg, easy",
        "FedAvg, hard",
        "FedProx, easy",
        "FedProx, hard",
    ]
    separations = [row.configs[0].data["separation"] for row in comparison.rows]
    assert separations == [8.0, 0.5, 8.0, 0.5]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["algorithm.lr=0.1,"], "has an empty value"),
        (["algorithm.lr=0.1,0.10"], "has a value twice: 0.1 and 0.10"),
        (["algorithm.lr=0.1,0.3", "algorithm.lr=1"], "algorithm.lr is given twice"),
        (["seed=1,2"], "takes its seeds from --seeds"),
        (["seed=1"], "takes its seeds from --seeds"),
        (["algorithm.lr=0.1,fast"], "row 'lr = fast' has 1 problem"),
        ([",=1,2"], "unknown key"),
        (["=1,2"], "--set takes KEY=VALUE"),
    ],
)
def test_what_is_refused(folder, settings, message):
    with pytest.raises(InputError, match=message):
        find_comparison(folder / "small.toml", settings, None, None, None, "0")


def test_too_many_combinations_are_counted_before_they_are_made(folder):
    values = ",".join(map(str, range(1, 2001)))
    settings = [f"{key}={values}" for key in ("rounds", "training.epochs", "training.batch_size")]
    with pytest.raises(InputError) as caught:
        find_comparison(folder / "small.toml", settings, None, "1,3", None, "0,1")
    assert "2 x 2,000 x 2,000 x 2,000 = 16,000,000,000 rows" in str(caught.value)
    assert "32,000,000,000 runs with 2 seeds each; at most 1,000" in str(caught.value)


def test_the_limit_holds_for_rows_and_columns(folder, monkeypatch):
    monkeypatch.setattr(sweep, "MOST_ROWS", 3)
    with pytest.raises(InputError, match="2 x 2 = 4 rows, 8 runs with 2 seeds each"):
        read_comparison(folder / "grid.toml")


def test_a_config_without_values_to_compare_says_what_to_add(folder):
    with pytest.raises(InputError, match=r"--set algorithm.lr=0.1,0.3"):
        find_comparison(folder / "small.toml", ["rounds=3"], None, None, None, None)
