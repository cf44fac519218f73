"""The examples run as they stand, in processes of their own."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fedensemble.core.algorithm import algorithms
from fedensemble.experiment.studies.compare import read_comparison
from fedensemble.testing import check_algorithm
from fedensemble.testing.algorithm import simulation_engines

from .test_cli import SMALL

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def python(*arguments: object, cwd: Path, paths: tuple[Path, ...] = ()) -> str:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", *map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_quickstart(tmp_path: Path) -> None:
    out = python(EXAMPLES / "quickstart.py", cwd=tmp_path)
    assert float(re.findall(r"test accuracy (\S+)", out)[-1]) > 0.85  # 0.91 when it was written
    right, wrong = map(float, re.findall(r"mean entropy .*: (\S+)", out))
    assert right < wrong


def test_regression_uncertainty(tmp_path: Path) -> None:
    out = python(EXAMPLES / "regression_uncertainty.py", "band.png", cwd=tmp_path)
    assert float(re.findall(r"mse (\S+)", out)[0]) < 0.03
    known, gap = map(float, re.findall(r"mean variance (\S+)", out))
    assert gap > 5 * known
    assert (tmp_path / "band.png").read_bytes().startswith(b"\x89PNG")


def own_algorithm() -> type:
    spec = importlib.util.spec_from_file_location(
        "normalized", EXAMPLES / "own_algorithm" / "normalized.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Normalized


@pytest.mark.parametrize("engine", simulation_engines())
def test_own_algorithm_keeps_the_contract(engine: str) -> None:
    check_algorithm(own_algorithm(), engine)


def test_own_algorithm_is_short() -> None:
    assert len((EXAMPLES / "own_algorithm" / "normalized.py").read_text().splitlines()) < 40


def test_own_algorithm_is_found_by_its_entry_point(tmp_path: Path) -> None:
    """What `pip install` would leave behind: the module and a dist-info folder with the entry
    points.
    """
    project = tomllib.loads((EXAMPLES / "own_algorithm" / "pyproject.toml").read_text())["project"]
    installed = tmp_path / f"fedensemble_fednova-{project['version']}.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in points.items())
        for group, points in project["entry-points"].items()
    ]
    (installed / "entry_points.txt").write_text("\n".join(lines))
    (tmp_path / "small.toml").write_text(SMALL.format(rounds=5))
    paths = (tmp_path, EXAMPLES / "own_algorithm")

    commands = ["ls algorithms --json"] + [
        f"run small.toml --out {engine} --set algorithm.name=normalized --set engine.name={engine}"
        for engine in ("loop", "vector")
    ]
    said = python("-c", _COMMANDS, *commands, cwd=tmp_path, paths=paths)
    listed, _ = json.JSONDecoder().raw_decode(said)
    record = next(record for record in listed if record["name"] == "normalized")
    assert (
        record["reference"] == "Wang et al. 2020"
        and record["models_up"] == record["models_down"] == 1
    )
    for engine in ("loop", "vector"):
        summary = json.loads((tmp_path / engine / "summary.json").read_text())
        assert summary["rounds"] == 5


# One process for all commands, because starting one takes seconds.
_COMMANDS = """
import sys
from fedensemble.cli.main import app
for command in sys.argv[1:]:
    app(command.split(), standalone_mode=False)
"""


def test_experiments_name_every_algorithm() -> None:
    """Files under experiments/ are valid, and none of the methods is missing from the comparison of
    all.
    """
    comparison = read_comparison(ROOT / "experiments" / "algorithms.toml")
    rows = [
        (row.configs[0].algorithm["name"], row.configs[0].ensemble.modes) for row in comparison.rows
    ]
    # One mode of IFCA and FedEM is FedAvg; local training has no global model to compare.
    ensembles_only = {name for name in algorithms if algorithms[name].joint}
    expected = [(name, 5) for name in algorithms if name != "local"]
    expected += [(name, 1) for name, _ in expected if name not in ensembles_only]
    assert sorted(rows) == sorted(expected)
