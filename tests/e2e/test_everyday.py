"""What users do every day: wrong keys, refused starts, longer runs, deleting runs."""

import json
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pytest

from fedensemble.experiment.storage.folder_lock import FolderLock
from fedensemble.experiment.storage.run_folder import find_runs

from .command_line import run

FAST = ("--device", "cpu")


def runs_of(folder: Path) -> list[Path]:
    return [store.path for store in find_runs(folder / "runs")]


def test_hints_on_the_command_line(folder):
    code, _, errors = run("run", "small.toml", "--set", "lr=0.1", cwd=folder)
    assert code == 2 and "unknown key 'lr': did you mean 'algorithm.lr'?" in errors
    assert not (folder / "runs").exists()


def test_ls_without_a_topic_lists_the_topics(folder):
    code, said, _ = run("ls", cwd=folder)
    assert code == 0 and "| algorithms |" in said and "fedprox" in said and "| runs |" in said
    code, said, _ = run("ls", "--json", cwd=folder)
    topics = {record["topic"]: record["names"] for record in json.loads(said)}
    assert "stratified" in topics["schedules"] and topics["runs"] == []


REFUSED = {
    "a missing file": ["data.source=npz", "data.path=nowhere.npz"],
    "too few clients": ["data.clients=4"],
    "labels that do not fit": ["training.loss=mse", "ensemble.combine=probabilities"],
    "a model that does not fit the data": [
        "data.source=npz",
        "data.path=flat.npz",
        "model.name=cnn",
    ],
    "too little memory": ["model.hidden=[200000, 200000]"],
}


@pytest.mark.parametrize("settings", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("out", [[], ["--out", "here/mine"]], ids=["runs", "out"])
def test_a_refused_start_leaves_nothing_behind(folder, settings, out):
    np.savez(folder / "flat.npz", x=np.zeros((60, 5), "float32"), y=np.arange(60) % 3)
    before = sorted(folder.rglob("*"))
    words = [word for setting in settings for word in ("--set", setting)]
    code, _, errors = run("run", "small.toml", *FAST, *words, *out, cwd=folder)
    assert code == 2 and errors.startswith("error: ")
    assert sorted(folder.rglob("*")) == before


def test_a_refused_start_spares_other_runs_and_folders(folder):
    (folder / "mine").mkdir()
    assert run("run", "small.toml", *FAST, cwd=folder)[0] == 0
    before = sorted(folder.rglob("*"))
    for out in ([], ["--out", "mine"]):
        assert run("run", "small.toml", *FAST, "--set", "data.clients=4", *out, cwd=folder)[0] == 2
    assert sorted(folder.rglob("*")) == before


def test_a_comparison_that_is_refused_leaves_no_unfinished_runs(folder):
    np.savez(folder / "flat.npz", x=np.zeros((60, 5), "float32"), y=np.arange(60) % 3)
    (folder / "compare.toml").write_text(
        'base = "small.toml"\nseeds = [0]\n[[row]]\nlabel = "good"\n[[row]]\nlabel = "bad"\n'
        'set = { "ensemble.clients_per_round" = 13, "ensemble.strata" = 3 }\n'
    )
    assert run("compare", "compare.toml", *FAST, cwd=folder)[0] == 2
    assert runs_of(folder) == []


def test_a_comparison_by_a_metric_that_a_finished_run_lacks_is_refused(folder):
    """Runs of earlier versions have no AURC, and finished runs are not tested again."""
    file = folder / "compare.toml"
    file.write_text('metric = "aurc"\nbase = "small.toml"\nseeds = [0]\n[[row]]\nlabel = "a"\n')
    code, text, errors = run("compare", "compare.toml", *FAST, cwd=folder)
    assert code == 0 and "AURC" in text, errors
    summary_file = runs_of(folder)[0] / "summary.json"
    summary = json.loads(summary_file.read_text())
    del summary["test"]["aurc"]
    summary_file.write_text(json.dumps(summary))
    code, _, errors = run("compare", "compare.toml", *FAST, cwd=folder)
    assert code == 2 and "was made before 'aurc' was recorded" in " ".join(errors.split())


def test_a_finished_run_is_extended(folder):
    _, _, _ = run("run", "small.toml", *FAST, cwd=folder)
    code, said, _ = run("run", "small.toml", *FAST, "--set", "rounds=5", cwd=folder)
    short, long = sorted(
        runs_of(folder), key=lambda path: len((path / "metrics.jsonl").read_text())
    )
    assert code == 0 and f"Extending {short.relative_to(folder)}, which is kept as it is." in said
    assert f"Continuing {long.relative_to(folder)} after round 3." in said
    run("run", "small.toml", *FAST, "--set", "rounds=5", "--runs", "anew", cwd=folder)
    (anew,) = [store.path for store in find_runs(folder / "anew")]
    for name in ("modes.safetensors", "metrics.jsonl", "predictions.json", "config.toml"):
        assert (long / name).read_bytes() == (anew / name).read_bytes()
    # A comparison never starts from a run with fewer rounds: its own runs are trained anew.
    shutil.rmtree(long)
    code, said, _ = run(
        "compare",
        "small.toml",
        *FAST,
        "--seeds",
        "0",
        "--modes",
        "3",
        "--set",
        "rounds=5",
        cwd=folder,
    )
    assert code == 0 and "Extending" not in said and "Continuing" not in said


def test_a_run_is_extended_in_its_folder(folder):
    run("run", "small.toml", *FAST, "--out", "mine", cwd=folder)
    code, said, _ = run(
        "run", "small.toml", *FAST, "--out", "mine", "--set", "rounds=5", cwd=folder
    )
    assert code == 0 and "Continuing mine after round 3." in said
    assert tomllib.loads((folder / "mine" / "config.toml").read_text())["rounds"] == 5
    assert json.loads((folder / "mine" / "summary.json").read_text())["rounds"] == 5
    code, _, errors = run("run", "small.toml", *FAST, "--out", "mine", cwd=folder)
    assert code == 2 and "A run can be extended, but not shortened." in errors


EXPLODE = ("--set", "algorithm.lr=1e7", "--set", "model.hidden=[]", "--set", "rounds=9")


def test_an_exploding_loss_is_reported(folder):
    code, said, errors = run("run", "small.toml", *FAST, *EXPLODE, cwd=folder)
    assert code == 1 and "warning: runs/small/" in said and "(diverged)" in said
    assert "has diverged: the training loss has exploded" in errors and "Report: runs/small" in said
    assert "| diverged |" in run("ls", "runs", cwd=folder)[1]
    code, said, errors = run("run", "small.toml", *FAST, *EXPLODE, cwd=folder)
    assert code == 1 and "has diverged" in errors, "and the same command says so again"
    code, said, errors = run(
        "compare", "small.toml", *FAST, *EXPLODE, "--seeds", "0", "--modes", "3", cwd=folder
    )
    assert (
        code == 1
        and "These runs diverged; their results mean nothing:" in errors
        and "| K = 3 |" in said
    )


def trained(folder: Path) -> Path:
    """A finished run, with all files that commands write into its folder."""
    assert run("run", "small.toml", *FAST, "--profile", cwd=folder)[0] == 0
    (path,) = runs_of(folder)
    assert run("report", path, cwd=folder)[0] == 0
    return path


def test_rm_deletes_a_run(folder):
    path = trained(folder)
    code, said, _ = run("rm", path, "--yes", cwd=folder)
    assert code == 0 and "done, rounds 3/3" in said and "Deleted 1 of 1 runs." in said
    assert not path.exists()


def test_rm_deletes_a_run_with_personal_models(folder):
    assert run("run", "small.toml", *FAST, "--set", "data.calibration=0.2", cwd=folder)[0] == 0
    (path,) = runs_of(folder)
    code, _, errors = run("personalize", path, "--method", "select,tune", cwd=folder)
    assert code == 0, errors
    assert len(list(path.glob("personal-*.safetensors"))) == 2
    code, _, errors = run("rm", path, "--yes", cwd=folder)
    assert code == 0, errors
    assert not path.exists()


def test_rm_asks(folder):
    path = trained(folder)
    code, said, _ = run("rm", path, cwd=folder)  # the input of this process is empty
    assert code == 1 and "Nothing was deleted." in said and (path / "summary.json").exists()


def test_rm_deletes_runs_and_nothing_else(folder):
    path = trained(folder)
    before = sorted(folder.rglob("*"))
    (folder / "link").symlink_to(path)
    (folder / "project").mkdir()
    shutil.copy(path / "config.toml", folder / "project")
    for what, problem in (
        (folder, "is not a run"),
        (path.parent, "is not a run"),
        ("nowhere", "There is no folder nowhere."),
        ("link", "is a link"),
        ("project", "is not a run"),
        ("small.toml", "There is no folder"),
    ):
        code, _, errors = run("rm", what, "--yes", cwd=folder)
        assert code == 2 and problem in errors, what
    code, _, errors = run("rm", "--yes", cwd=folder)
    assert code == 2 and "Name the folders" in errors
    (path / "thesis.tex").write_text("years of work")
    code, _, errors = run("rm", path, "--yes", cwd=folder)
    assert code == 2 and "holds files that are not of the run: thesis.tex" in errors
    assert set(before) <= set(folder.rglob("*"))


def test_rm_keeps_a_run_in_use(folder):
    path, other = trained(folder), folder / "other"
    run("run", "small.toml", *FAST, "--out", "other", cwd=folder)
    lock = FolderLock(path)
    lock.acquire()
    try:
        code, said, errors = run("rm", path, other, "--yes", cwd=folder)
    finally:
        lock.release()
    assert code == 2 and "Deleted 1 of 2 runs." in said and "Another process trains in" in errors
    assert (path / "summary.json").exists() and not other.exists()


def test_rm_of_unfinished_runs(folder):
    path = trained(folder)
    unfinished = path.with_name("unfinished")
    shutil.copytree(path, unfinished)
    (unfinished / "summary.json").unlink()
    code, said, _ = run("rm", "--unfinished", "--yes", cwd=folder)
    assert code == 0 and "unfinished: unfinished, rounds 3/3" in said
    assert runs_of(folder) == [path]
    code, said, _ = run("rm", path, "--unfinished", "--yes", cwd=folder)
    assert code == 0 and "There are no unfinished runs." in said and path.exists()
