"""Configs and --set: whatever is given, a run can be made of it and trained, or an error of ours
says why not.
"""

import math
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from fedensemble.config.build import build_data, build_federation
from fedensemble.config.plugins import PLUGIN_TABLES
from fedensemble.config.schema import Config, resolve
from fedensemble.config.toml import read_toml, with_settings

from .budget import attempt, examples, generators, mutated

BASE = {
    "rounds": 2,
    "data": {
        "source": "gaussians",
        "n": 24,
        "n_test": 6,
        "classes": 2,
        "features": 3,
        "clients": 4,
    },
    "model": {"name": "mlp", "hidden": [3]},
    "ensemble": {"modes": 2, "clients_per_round": 2},
    "engine": {"name": "loop", "device": "cpu"},
}
VALUES = (
    "-1",
    "0",
    "1",
    "2",
    "3",
    "0.5",
    "1e-300",
    "1e39",
    "1e300",
    "inf",
    "-inf",
    "nan",
    "1000000000",
    "1000000000000",
    "9223372036854775807",
    "9223372036854775808",
    "true",
    "x",
    "''",
    "[]",
    "[1]",
    "[-1]",
    "[1000000000]",
    "['x']",
    "{}",
    "{a=1}",
    "[[[]]]",
    "1979-05-27",
    "fedavg",
    "scaffold",
    "qsgd",
    "adam",
    "classes",
    "natural",
    "lstm",
    "cnn",
    "vector",
    "/dev/null",
    "a\0b",
    "\x1b[31m",
    "99:99",
)


def keys() -> list[str]:
    """Every key that some config may have, dotted."""
    found = [
        f"{name}.{inner}"
        for name in ("ensemble", "training", "evaluation", "engine")
        for inner in Config.model_fields[name].annotation.model_fields
    ]
    for section in PLUGIN_TABLES:
        for choice in section.choices:
            found.append(".".join((*section.names_at, choice.key)))
            found += [
                ".".join((*section.path, o))
                for name in choice.registry
                for o in choice.options(name)
            ]
    return sorted(
        {
            *found,
            *Config.model_fields,
            "data.validation",
            "data.calibration",
            "data.new_clients",
            "data.server_share",
            "data.server_file",
            "nothing",
        }
    )


# these read files or start other programs
PICTURES = {"data.source", "data.root", "data.path", "track"}
KEYS = [key for key in keys() if key not in PICTURES]
SETTING = st.builds("{}={}".format, st.sampled_from(KEYS), st.sampled_from(VALUES))


def train(settings: list[str]) -> None:
    """Two rounds, or as far as it goes."""
    config = resolve(with_settings(BASE, settings))
    config.toml(), config.hash()
    federation = build_federation(config, build_data(config))
    for report in federation.rounds(2):
        assert report.loss is None or math.isfinite(report.loss)
    prediction = federation.ensemble.predict(np.zeros((2, 3)))
    assert bool(prediction.mean.isfinite().all())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("key", KEYS)
def test_one_odd_setting(key: str) -> None:
    for random in generators(sum(key.encode()), 2):
        setting = f"{key}={VALUES[random.integers(len(VALUES))]}"
        attempt(lambda setting=setting: train([setting]), case=setting)


@pytest.mark.filterwarnings("ignore")
@given(st.lists(SETTING, min_size=2, max_size=4))
@examples(60)
def test_several_odd_settings(settings: list[str]) -> None:
    attempt(lambda: train(settings), case=settings)


@given(st.text(max_size=60), st.text(max_size=60))
@examples(200)
def test_settings_of_any_text(key: str, value: str) -> None:
    attempt(lambda: resolve(with_settings(BASE, [f"{key}={value}"])), case=(key, value))


def test_damaged_files(tmp_path: Path) -> None:
    words = (
        b'extends = "f.toml"\n',
        b"[",
        b"]]",
        b"{",
        b"9" * 5000,
        b"[" * 500,
        b"a." * 300,
        b"\x00",
        b"inf",
        b'"""',
    )
    content, file = tomli_w.dumps(BASE).encode(), tmp_path / "f.toml"
    for random in generators(1, 400):
        file.write_bytes(changed := mutated(content, random, words))
        attempt(lambda: resolve(read_toml(file)), case=changed)
