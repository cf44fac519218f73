"""Bad input: one clear message, exit code 2, no traceback, nothing destroyed."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from fedensemble import DivergedError, Federation
from fedensemble.experiment.storage.run_folder import RunFolder
from fedensemble.version import VERSION

from .command_line import run

BAD_SETTINGS = [
    (["ensemble.mode=3"], "ensemble.mode: unknown key 'mode': did you mean 'modes'?"),
    (["ensembel.modes=3"], "ensembel: unknown key 'ensembel': did you mean 'ensemble'?"),
    (["algorithm.name=fedavgg"], "unknown algorithm 'fedavgg': did you mean 'fedavg'?"),
    (["algorithm.mu=1.0"], "algorithm.mu: unknown key 'mu'"),
    (["algorithm.lr=fast"], "algorithm.lr: input should be a valid number"),
    (["algorithm.lr=-1"], "FedAvg needs lr > 0; got -1"),
    (["algorithm.optimizer.name=sdg"], "unknown optimizer 'sdg': did you mean 'sgd'?"),
    (["ensemble.modes=0"], "ensemble.modes: input should be greater than 0; got 0"),
    (["rounds=2.5"], "rounds: input should be a valid integer"),
    (["ensemble.strata=50"], "needs strata <= clients_per_round"),
    (["ensemble.clients_per_round=13"], "needs clients_per_round <= clients"),
    (["ensemble.strata=7"], "needs strata <= clients_per_round"),
    (["ensemble.schedule=stratfied"], "did you mean 'stratified'?"),
    (["engine.name=vectr"], "did you mean 'vector'?"),
    (["engine.options.blok=3"], "unknown option of engine 'vector' 'blok': did you mean 'block'?"),
    (
        ["engine.options.block=1.5"],
        "Engine 'vector' needs block to be an integer >= 1; got block=1.5.",
    ),
    (
        ["engine.options.block=x"],
        "Engine 'vector' needs block to be an integer >= 1; got block='x'.",
    ),
    (
        ["engine.options.memory=-1"],
        "Engine 'vector' needs memory to be a finite number above 0; got memory=-1.",
    ),
    (
        ["engine.options.deterministic=maybe"],
        "needs deterministic to be true or false; got deterministic='maybe'.",
    ),
    (["engine.device=gpu"], "device is 'cpu', 'cuda'"),
    (["data.source=mnits"], "unknown dataset 'mnits': did you mean 'mnist'?"),
    (["data.partition=classses"], "unknown partition 'classses': did you mean 'classes'?"),
    (["data.classes_per_client=9"], "classes"),
    (["data.clients=1000"], "clients"),
    (["model.hidden=wide"], "model.hidden"),
    (["model.name=resnet99"], "unknown model"),
    (["name=../x"], "name:"),
    (["nonsense"], "--set takes KEY=VALUE"),
]


@pytest.mark.parametrize(
    ("settings", "message"), BAD_SETTINGS, ids=[" ".join(s) for s, _ in BAD_SETTINGS]
)
def test_bad_settings(folder: Path, settings: list[str], message: str) -> None:
    sets = [part for setting in settings for part in ("--set", setting)]
    code, _, errors = run("run", "small.toml", *sets, cwd=folder)
    assert code == 2, errors
    assert message in errors
    assert "Traceback" not in errors
    assert not list((folder / "runs").glob("**/metrics.jsonl"))


def test_all_problems_at_once(folder: Path) -> None:
    sets = [
        "--set",
        "ensemble.mode=3",
        "--set",
        "rounds=0",
        "--set",
        "algorithm.lrr=1",
        "--set",
        "data.cliens=3",
    ]
    code, _, errors = run("run", "small.toml", *sets, cwd=folder)
    assert code == 2
    assert "4 problems" in errors
    for key in ("ensemble.mode", "rounds", "algorithm.lrr", "data.cliens"):
        assert key in errors


def test_a_shown_config_can_be_compared_with_other_algorithms(folder: Path) -> None:
    code, shown, _ = run("show", "small.toml", "--set", "algorithm.name=fedprox", cwd=folder)
    assert code == 0 and "mu = " in shown and "engine.options" not in shown
    (folder / "prox.toml").write_text(shown)
    code, _, errors = run(
        "compare", "prox.toml", "--algorithms", "fedavg,fedprox,fedprxo", cwd=folder
    )
    assert code == 2 and errors.startswith("error: row 'fedprxo' has 1 problem:")
    assert "did you mean 'fedprox'?" in errors
    code, output, errors = run(
        "compare", "prox.toml", "--algorithms", "fedavg,fedprox", "--seeds", "0", cwd=folder
    )
    assert code == 0 and "| fedavg |" in output and "| fedprox |" in output, errors


def test_files_that_are_no_configs(folder: Path) -> None:
    (folder / "broken.toml").write_text("a = [1,")
    (folder / "binary.toml").write_bytes(bytes(range(256)))
    (folder / "self.toml").write_text('extends = "self.toml"')
    for name, message in (
        ("missing.toml", "Cannot read"),
        ("broken.toml", "is not valid TOML"),
        ("binary.toml", "is not a text file"),
        ("self.toml", "extends itself"),
        (".", "is a folder, but no run"),
    ):
        code, _, errors = run("run", name, cwd=folder)
        assert code == 2 and message in errors, errors


def test_divergence_names_the_visit_and_keeps_the_run(folder: Path) -> None:
    code, _, errors = run(
        "run", "small.toml", "--set", "algorithm.lr=1e30", "--out", "a", cwd=folder
    )
    assert code == 1
    assert "round 1, client" in errors and "mode" in errors and "Lower algorithm.lr" in errors
    assert (folder / "a" / "config.toml").exists() and not (folder / "a" / "summary.json").exists()
    assert (
        json.loads(run("ls", "runs", "--runs", ".", "--json", cwd=folder)[1])[0]["state"]
        == "diverged"
    )
    code, _, again = run(
        "run", "small.toml", "--set", "algorithm.lr=1e30", "--out", "a", cwd=folder
    )
    assert code == 1 and again == errors


def test_a_folder_that_belongs_to_another_run(folder: Path) -> None:
    assert run("run", "small.toml", "--out", "a", cwd=folder)[0] == 0
    before = {p: p.read_bytes() for p in (folder / "a").rglob("*") if p.is_file()}
    code, _, errors = run("run", "small.toml", "--set", "seed=9", "--out", "a", cwd=folder)
    assert code == 2 and "belongs to a run with other settings (seed)" in errors
    (folder / "mine").mkdir()
    (folder / "mine" / "thesis.tex").write_text("years of work")
    code, _, errors = run("run", "small.toml", "--out", "mine", cwd=folder)
    assert code == 2 and "holds other files" in errors
    code, _, errors = run("run", "small.toml", "--out", "small.toml", cwd=folder)
    assert code == 2 and "is a file" in errors
    assert {p: p.read_bytes() for p in (folder / "a").rglob("*") if p.is_file()} == before


def test_two_processes_in_one_folder(folder: Path) -> None:
    from filelock import FileLock

    (folder / "a").mkdir()
    with FileLock(str(folder / "a" / ".lock")):
        code, _, errors = run("run", "small.toml", "--out", "a", cwd=folder)
    assert code == 2 and "Another process" in errors and "(--out or --runs)" in errors


def test_full_disk_and_missing_permission(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno
    import os

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        code, _, errors = run("run", "small.toml", "--out", "a", cwd=folder)
    assert code == 2 and "disk is full" in errors
    # nothing was lost: it goes on
    assert run("run", "small.toml", "--out", "a", cwd=folder)[0] == 0

    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", forbidden)
        code, _, errors = run("run", "small.toml", "--out", "b", cwd=folder)
    assert code == 2 and "Cannot write to b: no permission." in errors


def npz(path: Path, **arrays: object) -> None:
    base = {
        "x": np.zeros((40, 3), np.float32),
        "y": np.arange(40) % 2,
        "x_test": np.zeros((4, 3), np.float32),
    }
    np.savez(path, **{**base, "y_test": np.arange(4) % 2, **arrays})


def test_data_that_cannot_be_trained_on(folder: Path) -> None:
    bad = np.zeros((40, 3), np.float32)
    bad[7, 1] = np.nan
    for arrays, message in (
        ({"x": bad}, "nan or infinity (first in row"),
        ({"y": np.arange(39) % 2}, "39"),
        ({"y": -np.ones(40, int)}, "Labels"),
        ({"x_test": np.zeros((4, 2), np.float32)}, "they must agree"),
        ({"x": np.array([object()] * 40)}, "x"),
    ):
        npz(folder / "d.npz", **arrays)
        sets = ["--set", "data={source='npz', path='d.npz', clients=4}"]
        (folder / "npz.toml").write_text(
            "[data]\nsource='npz'\npath='d.npz'\nclients=4\n[ensemble]\nmodes=1\nclients_per_round=2"
        )
        code, _, errors = run("run", "npz.toml", cwd=folder)
        assert code == 2 and message in errors, (errors, sets)
        assert "Traceback" not in errors


def test_missing_data_says_where_and_how(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDENSEMBLE_DATA", str(folder / "nothing"))
    (folder / "m.toml").write_text("[data]\nsource='mnist'\nclients=10\n[model]\nname='cnn'")
    code, _, errors = run("run", "m.toml", cwd=folder)
    assert code == 2
    for part in ("train-images-idx3-ubyte", str(folder / "nothing"), "fedensemble data get mnist"):
        assert part in errors


def test_clients_with_one_class_are_fine(folder: Path) -> None:
    code, _, errors = run(
        "run", "small.toml", "--set", "data.classes_per_client=1", "--out", "a", cwd=folder
    )
    assert code == 0, errors


def test_a_run_that_diverged_is_unfinished_once_it_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as changed:
        changed.setattr(Federation, "rounds", lambda self, count: iter(bursting()))
        assert run("run", "small.toml", "--out", "a", cwd=folder)[0] == 1
    assert RunFolder(folder / "a").state == "diverged"
    assert run("run", "small.toml", "--out", "a", cwd=folder)[0] == 0
    assert RunFolder(folder / "a").state == "done" and not (folder / "a" / "diverged.json").exists()


def bursting() -> Iterator[None]:
    raise DivergedError("loss became nan")
    yield


def test_a_shown_config_is_for_any_machine(folder: Path) -> None:
    code, shown, _ = run("show", cwd=folder)
    assert code == 0 and 'device = "auto"' in shown
    (folder / "shown.toml").write_text(shown)
    code, _, errors = run("run", "shown.toml", "--set", "rounds=1", "--out", "a", cwd=folder)
    assert code == 0, errors
    assert 'device = "c' in (folder / "a" / "config.toml").read_text()  # cpu or cuda
    code, shown, _ = run("show", "--set", "engine.device=cuda", cwd=folder)
    assert code == 0 and 'device = "cuda"' in shown


@pytest.mark.parametrize(
    "arguments", [["frobnicate"], ["run", "--frob"], ["ls", "things"], ["predict", "a"]]
)
def test_usage_errors(folder: Path, arguments: list[str]) -> None:
    code, _, errors = run(*arguments, cwd=folder)
    assert code == 2 and "Traceback" not in errors


@pytest.mark.parametrize("command", ["run", "ls", "bench"])
def test_help_shows_defaults_without_escapes(folder: Path, command: str) -> None:
    code, output, _ = run(command, "--help", cwd=folder)
    assert code == 0 and "[default: " in output and "\\" not in output


def test_a_scale_that_does_not_exist(folder: Path) -> None:
    code, _, errors = run("reproduce", "table1", "--scale", "big", cwd=folder)
    assert code == 2 and errors == "error: table1.toml: unknown scale 'big': Known: full, smoke.\n"


def test_a_table_whose_data_are_missing_says_so_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDENSEMBLE_DATA", str(folder))
    code, output, errors = run("reproduce", "table2-mnist", cwd=folder)
    assert code == 2 and "Skipped" not in output and "fedensemble data get mnist" in errors


def test_a_real_process_prints_no_traceback(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fedensemble", "run", "small.toml", "--set", "ensemble.mode=3"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert (
        done.stderr.startswith("error: small.toml with --set ensemble.mode=3 has 1 problem")
        and "Traceback" not in done.stderr
    )


def write_own(folder: Path, **arrays: object) -> None:
    npz(folder / "own.npz", **arrays)
    (folder / "own.toml").write_text(
        "rounds=2\n[data]\nsource='npz'\npath='own.npz'\nclients=4\n[ensemble]\nmodes=1\nclients_per_round=2"
    )


def test_a_finished_run_notices_that_its_file_has_changed(folder: Path) -> None:
    write_own(folder)
    assert run("run", "own.toml", "--out", "a", cwd=folder)[0] == 0
    assert run("run", "own.toml", "--out", "a", cwd=folder)[0] == 0
    write_own(folder, y_test=(np.arange(4) + 1) % 2)
    code, _, errors = run("run", "own.toml", "--out", "a", cwd=folder)
    assert code == 2 and "has changed since" in errors


def test_without_a_test_set(folder: Path) -> None:
    np.savez(folder / "own.npz", x=np.zeros((40, 3), np.float32), y=np.arange(40) % 2)
    write_own_config = (
        "rounds=2\n[data]\nsource='npz'\npath='own.npz'\nclients=4\n[ensemble]\nclients_per_round=2"
    )
    (folder / "own.toml").write_text(write_own_config)
    code, output, errors = run("run", "own.toml", "--out", "a", cwd=folder)
    assert code == 0, errors
    assert "| uploaded, MB | 0." in output
    code, _, errors = run("compare", "own.toml", "--modes", "1,2", cwd=folder)
    assert code == 2 and "no test set" in errors


# Of torch, without the build: "+cpu" may be missing in the metadata of the package.
RELEASE = torch.__version__.partition("+")[0]


def test_seeds_count_once_and_version_is_said(folder: Path) -> None:
    code, _, errors = run("compare", "small.toml", "--modes", "1", "--seeds", "0,0", cwd=folder)
    assert code == 2 and "Seeds must be distinct" in errors
    code, output, _ = run("--version", cwd=folder)
    assert code == 0 and output.startswith(f"fedensemble {VERSION} (torch {RELEASE}")


def test_a_comparison_file_is_no_config(folder: Path) -> None:
    (folder / "cmp.toml").write_text('base = "small.toml"\n[[row]]\nlabel = "a"\n')
    code, _, errors = run("run", "cmp.toml", cwd=folder)
    assert code == 2
    assert "use 'fedensemble compare'" in errors


def test_one_damaged_run_does_not_hide_the_others(folder: Path) -> None:
    for seed in (0, 1):
        assert run("run", "small.toml", "--set", f"seed={seed}", cwd=folder)[0] == 0
    first = min((folder / "runs").glob("*/*/summary.json"))
    first.write_text("{broken")
    code, output, _ = run("ls", "runs", cwd=folder)
    assert code == 0
    assert "damaged" in output and "done" in output
