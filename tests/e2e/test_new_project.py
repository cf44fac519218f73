"""`fedensemble new`: inside the project, pytest and the commands work, for its creator only."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedensemble.scaffold import trusted

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    environment = {
        **os.environ,
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home),
        "PYTHONPATH": str(REPOSITORY / "src"),
        "OMP_NUM_THREADS": "1",
    }

    def run(*words, cwd=tmp_path, module="fedensemble"):
        return subprocess.run(
            [sys.executable, "-P", "-m", module, *map(str, words)],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
        )

    return run


def test_a_new_project_works_at_once_and_a_copy_of_it_runs_no_code(run, tmp_path):
    made = run("new", "zq-app")
    assert made.returncode == 0, made.stderr
    assert made.stdout.splitlines()[-3:] == [
        "  cd zq-app",
        "  pytest",
        "  fedensemble run config.toml",
    ]
    project = tmp_path / "zq-app"
    again = run("new", "zq-app")
    assert again.returncode == 2 and "exists already" in again.stderr

    tested = run("-q", "-p", "no:cacheprovider", cwd=project, module="pytest")
    assert tested.returncode == 0 and "3 passed" in tested.stdout, tested.stdout + tested.stderr

    few = ("--set", "rounds=3", "--set", "data.sites=10", "--out", "run")
    trained = run("run", "../config.toml", *few, cwd=project / "tests")  # also below the project
    assert trained.returncode == 0 and "Report: run/report.html" in trained.stdout, trained.stderr

    # The same folder elsewhere is a project that this user has not created.
    copied = tmp_path / "copied"
    shutil.copytree(project, copied)
    (copied / "zq_app" / "__init__.py").write_text("open('/dev/stderr', 'w').write('RAN')\n")
    refused = run("show", "config.toml", cwd=copied)
    assert refused.returncode == 2 and "unknown model 'zq-app-net'" in refused.stderr
    assert "RAN" not in refused.stderr


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    return tmp_path / "settings" / "fedensemble" / trusted.FILE


def make_project(folder):
    folder.mkdir()
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "Zq.app"\nversion = "2.5"\n'
        '[project.entry-points."fedensemble.models"]\nmine = "zq_app.model:Net"\n'
        '[project.entry-points."console_scripts"]\nls = "zq_app.model:Net"\n'
    )
    return folder


def test_a_project_that_was_created_here_is_seen_as_an_installed_package(tmp_path, settings):
    from importlib.metadata import PackageNotFoundError, entry_points, version

    project = make_project(tmp_path / "zq-app")
    with pytest.raises(PackageNotFoundError):
        version("zq-app")
    assert trusted.trust(project) and oct(settings.stat().st_mode & 0o777) == "0o600"
    assert trusted.activate_project(tmp_path) is None  # not inside it
    (project / "deep").mkdir()
    assert trusted.activate_project(project / "deep") == project
    assert version("zq_app") == "2.5"
    (point,) = entry_points(group="fedensemble.models", name="mine")
    assert point.value == "zq_app.model:Net" and point.dist.name == "Zq.app"
    assert not [p for p in entry_points(group="console_scripts") if p.value.startswith("zq_app")]
    assert sys.path[-1] == str(project)


@pytest.mark.parametrize("content", ["", "{}", "[1, null]", '{"a": 1}', "[" * 100_000, "\x00\xff"])
def test_a_damaged_list_trusts_nothing(content, tmp_path, settings):
    project = make_project(tmp_path / "zq-app")
    settings.parent.mkdir(parents=True)
    settings.write_text(content)
    assert trusted.activate_project(project) is None
    assert trusted.trust(project) and trusted.activate_project(project) == project


@pytest.mark.parametrize("content", [None, "[", "project = 3", "[project]\nname = 7"])
def test_a_project_without_a_name_is_ignored(content, tmp_path, settings):
    project = make_project(tmp_path / "zq-app")
    trusted.trust(project)
    (project / "pyproject.toml").unlink()
    if content is not None:
        (project / "pyproject.toml").write_text(content)
    before = [*sys.path]
    assert trusted.activate_project(project) is None and sys.path == before


def test_a_folder_of_another_user_is_not_trusted(tmp_path, settings, monkeypatch):
    """As in /tmp, where somebody else may make the folder again after it was deleted."""
    project = make_project(tmp_path / "zq-app")
    trusted.trust(project)
    monkeypatch.setattr(os, "getuid", lambda: project.stat().st_uid + 1)
    assert trusted.activate_project(project) is None


def test_without_a_folder_of_settings_the_project_is_to_be_installed(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    assert not trusted.trust(tmp_path)
