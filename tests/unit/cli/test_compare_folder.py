"""`fedensemble compare` takes the config of a run's folder."""

import pytest
from typer.testing import CliRunner

from fedensemble.cli.main import app
from fedensemble.config.schema import resolve

CONFIG = {
    "rounds": 1,
    "data": {"clients": 8},
    "model": {"name": "mlp", "hidden": [4]},
    "ensemble": {"modes": 2, "clients_per_round": 4},
    "training": {"steps": 1, "batch_size": 8},
    "engine": {"device": "cpu"},
}


def compare(folder, *options):
    return CliRunner().invoke(app, ["compare", str(folder), "--runs", str(folder), *options])


def test_the_config_of_a_run_is_taken(tmp_path):
    (tmp_path / "config.toml").write_text(resolve(CONFIG).toml())
    result = compare(tmp_path, "--modes", "1,2", "--seeds", "0")
    assert result.exit_code == 0, result.output
    assert "| K = 1 |" in result.output and "| K = 2 |" in result.output
    result = compare(tmp_path)
    assert "config.toml has no rows to compare: add --algorithms" in str(result.exception)


@pytest.mark.parametrize("command", ["compare", "run", "show", "advise"])
def test_a_folder_that_is_no_run_is_an_error(command, tmp_path):
    result = CliRunner().invoke(app, [command, str(tmp_path)])
    assert result.exit_code != 0
    text = " ".join(str(result.exception).split())
    assert "is a folder, but no run: it has no config.toml. Give a file" in text
