"""The wheel and the source distribution have all files, and the wheel works where nothing else is.

`make dist` builds both; the wheel is built from the source distribution.
"""

import json
import os
import subprocess
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fedensemble.version import VERSION

from .environment import create

ROOT = Path(__file__).parents[2]
DIST = Path(os.environ["FEDENSEMBLE_DIST"]).absolute()
WHEEL = DIST / f"fedensemble-{VERSION}-py3-none-any.whl"
SOURCE = DIST / f"fedensemble-{VERSION}.tar.gz"


def files(*folders: str) -> set[str]:
    """The files below folders of the repository, without those that running the code leaves."""
    return {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
        and not {"__pycache__", ".hypothesis"} & set(path.parts)
        and not any(part.endswith(".egg-info") for part in path.parts)
    }


def test_the_wheel_has_the_package_and_its_data():
    names = {
        name for name in zipfile.ZipFile(WHEEL).namelist() if not name.startswith("fedensemble-")
    }
    assert names == {name.removeprefix("src/") for name in files("src")}
    assert {"fedensemble/py.typed", "fedensemble/defaults/digits.toml"} <= names


def test_the_source_distribution_has_what_tests_and_docs_need():
    with tarfile.open(SOURCE) as archive:
        names = {
            member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()
        }
    wanted = files("src", "tests", "docs", "examples", "benchmarks", "experiments")
    wanted |= {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt"}
    assert not wanted - names
    assert not [name for name in names if "__pycache__" in name]


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """Runs a program of an environment that has only the wheel and what it requires."""
    folder = tmp_path_factory.mktemp("clean")
    binaries = create(folder / "env", WHEEL)
    environment = {"PATH": f"{binaries}:/usr/bin:/bin", "HOME": str(folder)}
    environment |= {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert not done.returncode, done.stdout + done.stderr
        return done.stdout

    run.folder = folder
    return run


def test_version(clean):
    assert clean("fedensemble", "--version").startswith(f"fedensemble {VERSION} (")


def test_only_what_is_required_can_be_imported(clean):
    """The packages of extras are not there: the base stays light."""
    script = "from importlib.util import find_spec as f; print([n for n in {} if f(n)])"
    extras = ["onnx", "onnxscript", "onnxruntime", "datasets", "optuna", "pandas", "pyarrow"]
    extras += ["PIL", "flwr", "mlflow", "tensorboard", "sphinx", "mapie", "pytest"]
    found = clean("python", "-c", script.format([*extras, "torch"]))
    # matplotlib, which draws the figures of reports, requires Pillow.
    assert found == "['PIL', 'torch']\n"


def test_extras_that_are_missing_are_named(clean):
    clean("fedensemble", "run", "--set", "rounds=1", "--out", "tiny")
    script = (
        "import fedensemble as fe\n"
        "try: fe.load_ensemble('tiny').export('m.onnx')\n"
        "except fe.InputError as error: print(error)"
    )
    assert "pip install 'fedensemble[export]'" in clean("python", "-c", script)
    clean("fedensemble", "export", "tiny", "-o", "m.pt2")  # needs torch alone
    assert (clean.folder / "m.pt2").exists()


def test_train_predict_and_report(clean):
    clean("fedensemble", "run", "--set", "rounds=2", "--out", "digits")
    summary = json.loads((clean.folder / "digits" / "summary.json").read_text())
    assert summary["rounds"] == 2
    np.savez(clean.folder / "inputs.npz", x=np.zeros((3, 1, 8, 8), np.float32))
    clean("fedensemble", "predict", "digits", "inputs.npz", "-o", "out.csv")
    assert len((clean.folder / "out.csv").read_text().splitlines()) == 4
    clean("fedensemble", "report", "digits", "--out", "page.html")
    assert "</html>" in (clean.folder / "page.html").read_text()
    script = "import fedensemble as fe; print(len(fe.load_ensemble('digits')), fe.__file__)"
    modes, file = clean("python", "-c", script).split()
    assert modes == "5" and Path(file).is_relative_to(clean.folder / "env")
