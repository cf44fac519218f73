"""Messages name Python arguments in Python, and keys of the config where a config is used."""

import re
from pathlib import Path

import pytest
from torch import nn

import fedensemble as fe
from fedensemble.config.build import build_data, build_federation
from fedensemble.config.schema import resolve
from fedensemble.errors import config_keys, setting

TABLES = "algorithm|ensemble|training|engine|participation|evaluation"
SOURCE = Path(fe.__file__).parent
# Packages whose users wrote a config, or run one.
OF_CONFIGS = {"config", "cli", "experiment", "report", "deploy", "catalog", "theory", "errors.py"}
DATA = fe.FederatedData.from_clients([([[0.0], [1.0]], [0, 1])] * 4)


def test_names():
    assert setting("algorithm.optimizer.clip") == "optimizer.clip"
    assert setting("engine.options.client_memory") == "engine_options['client_memory']"
    with config_keys():
        with config_keys():
            assert setting("ensemble.modes") == "ensemble.modes"
        assert setting("ensemble.modes") == "ensemble.modes"
    assert setting("ensemble.modes") == "modes"


def test_the_same_mistake_in_python_and_in_a_config():
    with pytest.raises(fe.InputError, match=r"Lower clients_per_round\."):
        fe.Federation(lambda: nn.Linear(1, 2), DATA, modes=1, clients_per_round=9)
    with pytest.raises(fe.InputError, match=r"Raise ask or lower clients_per_round\."):
        fe.Federation(lambda: nn.Linear(1, 2), DATA, modes=1, participation=fe.Devices(ask=1))
    config = resolve(
        {
            "data": {"source": "gaussians", "clients": 4},
            "ensemble": {"clients_per_round": 9, "modes": 2, "strata": 1},
        }
    )
    with pytest.raises(fe.InputError, match=r"Lower ensemble\.clients_per_round\."):
        build_federation(config, build_data(config))


def keys_in_messages(path):
    """Keys of a config in the text literals of a module, outside docstrings and `setting`."""
    text = re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL)
    text = re.sub(r"setting\([^)]*\)", "", text)
    literals = re.findall(r'f?"((?:[^"\\\n]|\\.)*)"', text)
    plain = [re.sub(r"\{[^}]*\}", "", literal) for literal in literals]
    return [
        found for literal in plain for found in re.findall(rf"\b(?:{TABLES})\.[a-z]\w*", literal)
    ]


@pytest.mark.parametrize(
    "path",
    [p for p in sorted(SOURCE.rglob("*.py")) if p.relative_to(SOURCE).parts[0] not in OF_CONFIGS],
    ids=lambda path: str(path.relative_to(SOURCE)),
)
def test_no_message_of_the_library_has_a_key(path):
    assert not keys_in_messages(path), "use setting('...') of errors.py"


def test_the_search_finds_keys(tmp_path):
    (tmp_path / "a.py").write_text('raise InputError(f"{x} is bad. Lower ensemble.modes.")\n')
    assert keys_in_messages(tmp_path / "a.py") == ["ensemble.modes"]
