"""An unknown key says where the key of that name is: each leaf key of the schema and of all
plug-ins, and the names of the field.
"""

import pytest

from fedensemble.config.hints import SYNONYMS, config_keys
from fedensemble.config.schema import Config, check
from fedensemble.config.toml import default_file, read_toml, with_settings
from fedensemble.core.algorithm import algorithms
from fedensemble.core.engine import engines
from fedensemble.errors import InputError
from fedensemble.experiment.studies.compare import read_comparison

KEYS = config_keys()


def problems(setting: str) -> str:
    """The problems of the default config with this setting, without the lists of known keys."""
    _, found = check(with_settings(read_toml(default_file("digits.toml")), [setting]))
    return "\n".join(problem.split(" Known: ")[0] for problem in found)


def test_the_keys_are_those_of_the_schema_and_of_the_plugins():
    assert {"rounds", "ensemble.modes", "training.batch_size", "report.publish_clients"} <= set(
        KEYS
    )
    assert {"algorithm.lr", "algorithm.optimizer.momentum", "engine.options.block"} <= set(KEYS)
    assert {"data.source", "data.clients", "data.alpha", "model.hidden", "attack.share"} <= set(
        KEYS
    )
    assert not {"data", "model", "ensemble"} & set(KEYS), "tables are no leaf keys"
    assert KEYS["algorithm.lr"] == () and KEYS["algorithm.mu"] == ("fedac", "fedprox")
    # Every key that a config can have is among them.
    for name in algorithms:
        config, _ = check({"data": {"clients": 3}, "algorithm": {"name": name}})
        assert {f"algorithm.{key}" for key in config.algorithm} <= {*KEYS, "algorithm.optimizer"}


@pytest.mark.parametrize("key", sorted(KEYS))
def test_each_leaf_key_is_suggested_by_its_bare_name(key):
    leaf = key.rpartition(".")[2]
    if leaf not in Config.model_fields:  # `name` and `seed` are keys of the top level
        assert f"'{key}'" in problems(f"{leaf}=0")
    elif "." in key:
        assert f"'{key}'" in problems(f"report.{leaf}=0")


@pytest.mark.parametrize("name", sorted(SYNONYMS))
def test_names_of_the_field_are_suggested(name):
    assert SYNONYMS[name] in KEYS
    for spelling in (name, name.upper(), name.replace("_", "-")):
        assert f"'{SYNONYMS[name]}'?" in problems(f"{spelling}=0")


def test_a_key_of_another_table_or_of_another_plugin():
    assert "training.lr: unknown key 'lr': did you mean 'algorithm.lr'?" in problems(
        "training.lr=1"
    )
    assert "did you mean 'engine.options.block' (of vector) or " in problems("engine.block=3")
    assert "did you mean the option 'mu' of fedac, fedprox?" in problems("algorithm.mu=1")
    assert "did you mean 'ensemble.modes'?" in problems("modes=3"), "and not the table 'model'"
    assert "did you mean 'modes'?" in problems("ensemble.mode=3"), "the same table comes first"
    assert "did you mean 'training'?" in problems("train.epochs=3")
    assert "did you mean 'evaluation.every' or" in problems("evry=3"), "misspelt, in no table"
    assert problems("qwertz=3").endswith("unknown key 'qwertz':"), (
        "no hint is better than a wild one"
    )


def test_files_have_the_same_hints(tmp_path):
    (tmp_path / "base.toml").write_text("lr = 0.1\n[data]\nclients = 3\n")
    _, found = check(read_toml(tmp_path / "base.toml"))
    assert len(found) == 1 and "did you mean 'algorithm.lr'?" in found[0]
    file = tmp_path / "compare.toml"
    file.write_text('base = "base.toml"\n[[row]]\nlabel = "a"\nset = { "modes" = 3 }\n')
    with pytest.raises(InputError, match=r"did you mean 'ensemble\.modes'"):
        read_comparison(file)
    # A comparison file has keys of its own, and `algorithm.lr` is none of them.
    file.write_text('base = "base.toml"\nlr = 0.1\n[[row]]\nlabel = "a"\n')
    with pytest.raises(InputError, match="unknown key 'lr': Known: base"):
        read_comparison(file)


def test_a_plugin_that_cannot_be_imported_does_not_break_hints(monkeypatch):
    class Broken:
        dist, value = None, "broken"

        def load(self):
            raise ImportError("no module")

    engines._entry_points()
    monkeypatch.setitem(engines._external, "broken", Broken())
    assert "did you mean 'algorithm.lr'?" in problems("lr=0.1")
