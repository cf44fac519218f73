"""Configs: layers that override one another, and messages for all problems."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedensemble.algorithms import FedAvg
from fedensemble.config.schema import resolve
from fedensemble.config.toml import default_file, merge, read_toml, with_settings
from fedensemble.core.algorithm import algorithms
from fedensemble.errors import InputError
from fedensemble.experiment.studies.compare import changes_of, make_comparison, read_comparison

BASE = {
    "data": {
        "source": "digits",
        "partition": "classes",
        "classes_per_client": 2,
        "clients": 20,
        "test_fraction": 0.5,
    },
    "model": {"name": "mlp", "hidden": [8], "dropout": 0.1},
    "algorithm": {
        "name": "fedprox",
        "mu": 0.5,
        "lr": 0.3,
        "optimizer": {"name": "sgd", "momentum": 0.9, "clip": 1.0},
    },
    "participation": {"name": "devices", "drop": 0.1},
    "engine": {"name": "vector", "options": {"block": 3, "client_memory": "host"}},
}


def problems(values) -> list[str]:
    with pytest.raises(InputError) as error:
        resolve(values)
    first, *rest = str(error.value).splitlines()
    assert first.startswith(f"config has {len(rest)} problem")
    return [line.removeprefix("  - ") for line in rest]


@pytest.mark.parametrize(
    ("setting", "table", "left"),
    [
        ("algorithm.name=fedavg", "algorithm", {"name", "lr", "optimizer"}),
        ("model.name=cnn", "model", {"name", "dropout"}),
        ("model.name=lstm", "model", {"name", "dropout"}),  # its `hidden` is an integer
        ("data.partition=iid", "data", {"source", "partition", "clients", "test_fraction"}),
        ("data.source=mnist", "data", {"source", "partition", "clients", "classes_per_client"}),
        ("participation.name=everybody", "participation", {"name"}),
    ],
)
def test_another_name_drops_stale_options(setting: str, table: str, left: set[str]) -> None:
    merged = with_settings(BASE, [setting])
    assert merged[table].keys() == left
    assert {key: value for key, value in merged.items() if key != table} == {
        key: value for key, value in BASE.items() if key != table
    }
    resolve(merged)


@pytest.mark.parametrize("setting", ["algorithm.optimizer.name=adam", "algorithm.optimizer=adam"])
def test_another_optimizer(setting: str) -> None:
    merged = with_settings(BASE, [setting])["algorithm"]
    assert merged["optimizer"] == {"name": "adam", "clip": 1.0} and merged["mu"] == 0.5
    over_a_word = merge(
        {"algorithm": {"optimizer": "adam"}}, {"algorithm": {"optimizer": {"clip": 2.0}}}
    )
    assert over_a_word["algorithm"]["optimizer"] == {"name": "adam", "clip": 2.0}


def test_another_engine() -> None:
    assert with_settings(BASE, ["engine.name=loop"])["engine"]["options"] == {
        "client_memory": "host"
    }


def test_options_of_the_default_name_are_dropped() -> None:
    under = {"model": {"hidden": [8]}, "data": {"clients": 5}}
    assert with_settings(under, ["model.name=cnn"])["model"] == {"name": "cnn"}
    assert with_settings(under, ["model.name=mlp"])["model"] == {"name": "mlp", "hidden": [8]}


def test_options_given_with_the_name_are_kept() -> None:
    for settings in (
        ["algorithm.name=fedyogi", "algorithm.mu=1.0"],
        ["algorithm.mu=1.0", "algorithm.name=fedyogi"],
    ):
        (problem,) = problems(with_settings(BASE, settings))
        assert problem.startswith("algorithm.mu: unknown key 'mu'")
    merged = changes_of({"algorithm.mu": 1.0, "algorithm.name": "fedprox"})
    assert merge({"algorithm": {"name": "fedavg"}}, merged)["algorithm"] == {
        "name": "fedprox",
        "mu": 1.0,
    }


def test_the_same_name_and_unknown_names_drop_nothing() -> None:
    assert with_settings(BASE, ["algorithm.name=fedprox"]) == BASE
    assert with_settings(BASE, ["algorithm.name=fedprxo"])["algorithm"]["mu"] == 0.5
    wrong = {"algorithm": {"name": "fedavg", "mu": 0.5}}
    assert (
        with_settings(wrong, ["algorithm.name=fedavg", "algorithm.lr=1.0"])["algorithm"]["mu"]
        == 0.5
    )
    typo = merge(BASE, {"algorithm": {"lrr": 1.0}})
    (problem,) = problems(with_settings(typo, ["algorithm.name=fedavg"]))
    assert problem.startswith("algorithm.lrr: unknown key 'lrr': did you mean 'lr'?")


def test_extends_and_rows_are_layers(tmp_path: Path) -> None:
    (tmp_path / "under.toml").write_text(
        '[algorithm]\nname = "fedprox"\nmu = 0.5\n[data]\nclients = 20\n'
    )
    (tmp_path / "over.toml").write_text('extends = "under.toml"\n[algorithm]\nname = "fedavg"\n')
    assert read_toml(tmp_path / "over.toml")["algorithm"] == {"name": "fedavg"}
    (tmp_path / "rows.toml").write_text(
        'base = "under.toml"\nseeds = [0]\n[[row]]\nlabel = "a"\n[[row]]\nlabel = "b"\n'
        'set = { "algorithm.name" = "fedavg" }\n'
    )
    first, second = read_comparison(tmp_path / "rows.toml").rows
    assert first.configs[0].algorithm["mu"] == 0.5 and "mu" not in second.configs[0].algorithm


def test_problems_of_all_rows() -> None:
    rows = [
        ("a", {"algorithm": {"name": "fedavg"}}),
        ("b", {"algorithm": {"name": "fedprxo"}}),
        ("c", {}),
    ]
    with pytest.raises(InputError) as error:
        make_comparison("x", merge(BASE, {"rounds": 0}), rows, [0, 1], "accuracy")
    text = str(error.value)
    assert "rows 'a', 'c' have 1 problem:\n  - rounds: " in text
    assert (
        "row 'b' has 2 problems:\n"
        "  - algorithm.name: unknown algorithm 'fedprxo': did you mean 'fedprox'?"
    ) in text
    with pytest.raises(
        InputError, match="seed: input should be greater than or equal to 0; got -1"
    ):
        make_comparison("x", BASE, rows[:1], [0, -1], "accuracy")


def test_problems_of_all_sections_at_once() -> None:
    sets = [
        "algorithm.lr=-1",
        "algorithm.lrr=2",
        "algorithm.optimizer.momentum=2",
        "engine.name=fast",
        "ensemble.mode=3",
        "ensemble.strata=99",
        "data.partition=nope",
        "data.source=nope",
        "track=['x']",
        "participation.drop=2",
        "rounds=0",
    ]
    messages = problems(with_settings(BASE, sets))
    for start in (
        "data.source: unknown dataset",
        "data.partition: unknown partition",
        "algorithm.lrr: unknown key",
        "algorithm.optimizer: SGD needs 0 <= momentum < 1",
        "algorithm: FedProx needs lr > 0; got -1.0.",
        "participation: Participation 'devices' needs 0 <= drop <= 1",
        "engine.name: unknown engine",
        "ensemble: Schedule 'balanced' needs strata <= clients_per_round",
        "track: unknown tracker",
        "ensemble.mode: unknown key",
        "rounds: ",
    ):
        assert any(problem.startswith(start) for problem in messages), (start, messages)
    assert len(messages) == len(sets)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["model.hidden=32"], "model.hidden: must be a list, such as [32]; got 32."),
        (["model.hidden=[8"], "model.hidden: must be a list, such as [32]; got '[8'."),
        (["model.hidden=[8, 'x']"], "model.hidden 2: input should be a valid integer"),
        (["track=mlflow"], "track: must be a list, such as ['mlflow']; got 'mlflow'."),
        (
            ["name=a b"],
            "name: must be letters, digits, '-', '_' and '.', the first a letter or a digit; "
            "got 'a b'.",
        ),
        (["training=3"], "training: must be a table of settings; got 3."),
        (["model=7"], "model: must be a table of settings; got 7."),
        (["algorithm.optimizer=3"], "algorithm.optimizer: must be a table of settings; got 3."),
        (
            ["algorithm.optimizer.momentun=0"],
            "algorithm.optimizer.momentun: unknown key 'momentun': did you mean 'mom",
        ),
    ],
)
def test_messages(settings: list[str], problem: str) -> None:
    (message,) = problems(with_settings(BASE, settings))
    assert message.startswith(problem)


def test_messages_for_comparison_files(tmp_path: Path) -> None:
    (tmp_path / "rows.toml").write_text('base = "x"\n[[row]]\nlabel = "a"\n[[row]]\nlabl = "b"\n')
    with pytest.raises(InputError) as error:
        read_comparison(tmp_path / "rows.toml")
    assert "row 2: unknown key 'labl': did you mean 'label'?" in str(error.value)
    assert "row 2: label: is missing" in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rounds = 1\nrounds = 2\n", "line 2 gives 'rounds' for the second time"),
        ("[data]\nseed = 1\n[data]\n", "line 3 gives 'data' for the second time"),
        ("a = 1\na = [1,\n  2]", "line 2 gives 'a' for the second time"),
        ("a = [1,", "Invalid value"),
    ],
)
def test_duplicate_keys_of_a_file(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "twice.toml").write_text(text)
    with pytest.raises(InputError, match="is not valid TOML") as error:
        read_toml(tmp_path / "twice.toml")
    assert message in str(error.value)


def test_duplicate_settings() -> None:
    with pytest.raises(InputError, match="rounds is given twice: 'rounds=1' and 'rounds=2'"):
        with_settings(BASE, ["rounds=1", "seed=1", "rounds=2"])


def test_clients_are_required() -> None:
    assert problems({}) == ["data.clients: is missing; partition 'iid' needs a number of clients."]
    assert resolve({"data": {"partition": "natural"}}).data["clients"] is None


def test_names_come_first_and_empty_tables_are_not_shown() -> None:
    config = resolve(read_toml(default_file("digits.toml")))
    shown = tomllib.loads(config.toml(empty=False))
    for table, first in (
        ("data", "source"),
        ("model", "name"),
        ("algorithm", "name"),
        ("engine", "name"),
    ):
        assert next(iter(shown[table])) == first
    assert (
        next(iter(shown["algorithm"]["optimizer"])) == "name" and "options" not in shown["engine"]
    )
    assert resolve(shown).hash() == config.hash()


@pytest.mark.parametrize(
    ("settings", "written_out"),
    [
        (["algorithm=fedprox"], ["algorithm.name=fedprox"]),
        (
            ["algorithm=fedprox", "algorithm.mu=1.0"],
            ["algorithm.name=fedprox", "algorithm.mu=1.0"],
        ),
        (
            ["algorithm.lr=0.2", "algorithm=scaffold"],
            ["algorithm.name=scaffold", "algorithm.lr=0.2"],
        ),
        (["model=cnn"], ["model.name=cnn"]),
        (["data=sine"], ["data.source=sine"]),
        (["engine=loop"], ["engine.name=loop"]),
        (["aggregator=krum"], ["aggregator.name=krum"]),
        (["attack=alie", "attack.share=0.2"], ["attack.name=alie", "attack.share=0.2"]),
        (["participation=devices"], ["participation.name=devices"]),
    ],
)
def test_a_name_stands_for_its_table(settings, written_out):
    base = {"data": {"clients": 20}, "algorithm": {"name": "fedavg", "lr": 0.3}}
    short, long = (resolve(with_settings(base, texts)) for texts in (settings, written_out))
    assert short == long != resolve(base)


def test_an_option_may_have_the_name_of_a_table():
    base = {"data": {"clients": 20}, "algorithm": {"name": "fedsplit", "average": "all"}}
    config = resolve(with_settings(base, ["algorithm.average=reporting"]))
    assert config.algorithm["average"] == "reporting" and config.average is None


def test_a_name_that_is_registered_again_has_the_options_of_the_new_plug_in() -> None:
    def register(option: str) -> None:
        options = {"__annotations__": {option: float}, option: 1.0}
        made = dataclass(frozen=True, kw_only=True)(type("Mine", (FedAvg,), options))
        algorithms.register("mine")(made)

    values = {"data": {"clients": 10}, "algorithm": {"name": "mine", "mu": 0.5}}
    try:
        register("mu")
        assert resolve(values).algorithm["mu"] == 0.5
        algorithms._items.pop("mine")
        register("nu")
        with pytest.raises(InputError, match="unknown key 'mu'"):
            resolve(values)
    finally:
        algorithms._items.pop("mine")
