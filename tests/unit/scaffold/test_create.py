"""New projects: what is written, which names are refused, and that nothing is overwritten."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedensemble.deploy.app import build_client
from fedensemble.deploy.app_spec import read_app_spec
from fedensemble.deploy.signing import build_bundle
from fedensemble.errors import InputError, StoreError
from fedensemble.scaffold.create import create_project, package_name


@pytest.mark.parametrize(
    "name",
    [
        "", ".", "..", "My-App", "1app", "my app", "my--app", "-app", "app-", "my.app", "app\n", "é",
        "x y", "a" * 51, "my-app;rm", "$name", "class", "test", "torch", "numpy", "fedensemble",
        "fleet", "tests", "json",
    ],
)  # fmt: skip
def test_bad_names_are_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="project"):
        package_name(name)
    with pytest.raises(InputError, match="project"):
        create_project(Path(name))
    assert not list(tmp_path.iterdir())


@given(st.from_regex(r"zq[a-z0-9]{0,8}([-_][a-z0-9]{1,8}){0,2}", fullmatch=True))
def test_good_names_give_identifiers(name):
    assert package_name(name).isidentifier() and package_name(name) == name.replace("-", "_")


def test_a_folder_that_exists_is_not_changed(tmp_path):
    folder = tmp_path / "my-app"
    folder.mkdir()
    with pytest.raises(StoreError, match="exists already"):
        create_project(folder)
    assert not list(folder.iterdir())
    (tmp_path / "my-file").write_text("mine")
    with pytest.raises(StoreError, match="exists already"):
        create_project(tmp_path / "my-file")
    with pytest.raises(StoreError, match="Could not make"):
        create_project(tmp_path / "my-file" / "my-app")
    assert (tmp_path / "my-file").read_text() == "mine"


def test_a_package_in_the_working_directory_is_no_other_module(tmp_path, monkeypatch):
    (tmp_path / "zq_app").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    assert package_name("zq-app") == "zq_app"


@pytest.fixture
def project(tmp_path, monkeypatch):
    folder = tmp_path / "zq-app"
    create_project(folder)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] in ("zq_app", "fleet")]:
        del sys.modules[name]


def test_no_placeholder_is_left_and_all_code_is_formatted(project):
    files = [path for path in project.rglob("*") if path.is_file()]
    assert len(files) == 14
    for path in files:
        text = path.read_text()
        assert (
            "$name" not in text
            and "$package" not in text
            and "${" not in text.replace("${FLWR", "")
        )
    for command in (["check", "--select", "E,F,I,B,UP"], ["format", "--check"]):
        subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--isolated", "--line-length", "100", "."],
            check=True,
            cwd=project,  # from which ruff tells the project's own packages
        )


def test_the_fleet_trains_the_model_of_the_project_on_the_data_of_a_site(project):
    """The Flower app is what `fedensemble deploy` writes, and its bundle is complete."""
    import fleet.client_app
    import zq_app

    spec = read_app_spec(project / "fleet")
    assert spec.config.model == {"name": "zq-app-net", "hidden": 32}
    context = SimpleNamespace(node_config={"partition-id": 2})
    client = build_client(project / "fleet", fleet.client_app.load, context)
    x, y = zq_app.data.read_site(2)
    np.testing.assert_array_equal(client.data.x.numpy(), x)
    assert torch.equal(client.data.y, torch.from_numpy(y))
    bundle = build_bundle(project)
    for name in (
        "zq_app/model.py",
        "zq_app/data.py",
        "config.toml",
        "fleet/config.toml",
        "fleet/data.py",
    ):
        assert name.encode() in bundle
    components = tomllib.loads((project / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert components["components"]["clientapp"] == "fleet.client_app:app"


def test_a_project_is_written_without_torch(tmp_path):
    """Importing torch alone takes longer than a project should."""
    code = (
        "import sys; from pathlib import Path; from fedensemble.cli.commands.new import new_project; "
        f"new_project(Path({str(tmp_path / 'my-app')!r})); assert 'torch' not in sys.modules"
    )
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "my-app" / "fleet" / "client_app.py").exists()
