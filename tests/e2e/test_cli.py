"""The command line in separate processes, which are also killed and resumed.

Starting a process takes seconds, so what does not depend on one runs in this process.
"""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest

from .command_line import run

SMALL = """
name = "small"
rounds = {rounds}
[data]
source = "gaussians"
n = 400
classes = 4
clients = 12
partition = "classes"
classes_per_client = 2
[model]
name = "mlp"
hidden = [8]
[ensemble]
modes = 3
strata = 3
clients_per_round = 6
[evaluation]
every = 5
"""


def fedensemble(
    *arguments: object, cwd: Path, **options: object
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-m", "fedensemble", *map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "small.toml"
    file.write_text(SMALL.format(rounds=20))
    return file


def trained_bytes(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("modes.safetensors", "metrics.jsonl")}


def test_run_report_predict_and_rerun(config: Path, tmp_path: Path) -> None:
    done = fedensemble("run", config, "--out", "a", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout and "\x1b" not in done.stdout
    assert {p.name for p in (tmp_path / "a").iterdir()} >= {
        "config.toml",
        "env.json",
        "metrics.jsonl",
        "modes.safetensors",
        "checkpoint",
        "summary.json",
        "curves.png",
        "report.md",
        "report.html",
        "clients.json",
        "predictions.json",
    }
    assert len((tmp_path / "a" / "metrics.jsonl").read_text().splitlines()) == 20

    summary = (tmp_path / "a" / "summary.json").read_bytes()
    assert run("run", config, "--out", "a", cwd=tmp_path)[0] == 0
    # its seconds would differ had it trained
    assert (tmp_path / "a" / "summary.json").read_bytes() == summary

    np.savez(tmp_path / "in.npz", x=np.random.default_rng(0).normal(size=(7, 8)).astype(np.float32))
    features = json.loads(summary)  # the run says what it is
    assert features["modes"] == 3
    _, listed, _ = run("ls", "runs", "--runs", ".", "--json", cwd=tmp_path)
    assert json.loads(listed)[0]["state"] == "done"
    code, shown, _ = run("report", "a", "--out", "page.html", cwd=tmp_path)
    assert code == 0 and "accuracy" in shown and "Report: page.html" in shown
    assert (tmp_path / "page.html").read_bytes() == (tmp_path / "a" / "report.html").read_bytes()


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_same_seed_same_bytes(config: Path, tmp_path: Path, engine: str) -> None:
    """In a new process, and in this one, where other tests have left their traces."""
    command = ("run", config, "--set", f"engine.name={engine}")
    done = fedensemble(*command, "--out", "a", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    code, _, errors = run(*command, "--out", "b", cwd=tmp_path)
    assert code == 0, errors
    assert trained_bytes(tmp_path / "a") == trained_bytes(tmp_path / "b")
    code, _, errors = run(*command, "--set", "seed=1", "--out", "c", cwd=tmp_path)
    assert code == 0, errors
    assert (
        trained_bytes(tmp_path / "c")["modes.safetensors"]
        != trained_bytes(tmp_path / "a")["modes.safetensors"]
    )


def test_killed_at_any_moment_it_continues_bit_for_bit(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL.format(rounds=90))
    command = ["run", "small.toml", "--checkpoint-seconds", "0"]
    code, _, errors = run(*command, "--out", "whole", cwd=tmp_path)
    assert code == 0, errors

    kills = 0
    for attempt in range(40):
        process = subprocess.Popen(
            [sys.executable, "-m", "fedensemble", *command, "--out", "killed"],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
        )
        metrics = tmp_path / "killed" / "metrics.jsonl"
        # some rounds further each time, then a moment that no round knows of
        target = 25 * (attempt + 1)
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if metrics.exists() and metrics.read_bytes().count(b"\n") >= target:
                time.sleep(0.003 * attempt)
                process.kill()
                break
            time.sleep(0.001)
        if process.wait(timeout=60) == 0:
            break
        kills += 1
    assert kills >= 2
    assert trained_bytes(tmp_path / "killed") == trained_bytes(tmp_path / "whole")


@pytest.mark.parametrize("presses", [1, 2])
def test_interrupt_is_said_and_costs_nothing(tmp_path: Path, presses: int) -> None:
    (tmp_path / "small.toml").write_text(SMALL.format(rounds=100_000))
    process = subprocess.Popen(
        [sys.executable, "-c", _HEARS_INTERRUPTS, "run", "small.toml", "--out", "a"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        metrics = tmp_path / "a" / "metrics.jsonl"
        deadline = time.monotonic() + 60
        while (
            not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 5)
            and time.monotonic() < deadline
        ):
            time.sleep(0.02)
        for _ in range(presses):
            process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "run the same command again" in errors and "Traceback" not in errors
    if presses == 1:
        assert "Stopping after this round" in output
        (newest,) = (tmp_path / "a" / "checkpoint").glob("*.safetensors")
        rounds = len(metrics.read_text().splitlines())
        assert newest.name == f"round-{rounds:08d}.safetensors"


# A process started in the background of a shell ignores interrupts, and so would its children.
_HEARS_INTERRUPTS = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from fedensemble.cli.main import main
main()
"""


def test_damaged_checkpoint_is_passed_over_aloud(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL.format(rounds=12))
    command = ("run", "small.toml", "--out", "whole")
    code, _, errors = run(*command, "--checkpoint-seconds", "0", cwd=tmp_path)
    assert code == 0, errors
    expected = trained_bytes(tmp_path / "whole")
    (tmp_path / "whole" / "summary.json").unlink()  # as if it had been killed before the end
    newest = max((tmp_path / "whole" / "checkpoint").glob("round-*"))
    content = bytearray(newest.read_bytes())
    content[-3] ^= 1
    newest.write_bytes(bytes(content))
    code, said, errors = run(*command, cwd=tmp_path)
    assert code == 0, errors
    assert "damaged" in said and "Continuing" in said
    assert trained_bytes(tmp_path / "whole") == expected


def test_compare_makes_one_table_and_one_plot(config: Path, tmp_path: Path) -> None:
    done = fedensemble("compare", config, "--modes", "1,3", "--seeds", "0,1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs" / "small").glob("compare-*")
    assert {p.name for p in folder.iterdir()} == {
        "report.md",
        "table.csv",
        "table.tex",
        "clients.csv",
        "runs.csv",
        "references.bib",
        "curves.png",
        "curves.pdf",
        "curves.svg",
        "runs.json",
        "report.html",
    }
    assert f"Figure: {(folder / 'curves.png').relative_to(tmp_path)}" in done.stdout
    rows = (folder / "table.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["method", "K = 1", "K = 3"]
    made = json.loads((folder / "runs.json").read_text())
    assert sum(map(len, made.values())) == 4
    strata = {
        label: tomllib.loads((tmp_path / runs[0] / "config.toml").read_text())["ensemble"]["strata"]
        for label, runs in made.items()
    }
    assert strata["K = 1"] == 1 < strata["K = 3"]  # one mode is the method itself
    page = (folder / "report.html").read_text()
    assert page.count('/report.html">seed') == 4  # links to the runs' own pages
    code, again, _ = run("report", folder, cwd=tmp_path)
    assert code == 0 and "| K = 3 |" in again
    assert (folder / "report.html").read_text() == page


def test_data_show_draws_the_partition(config: Path, tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    code, said, errors = run("data", "show", config, cwd=tmp_path)
    assert code == 0, errors
    assert set(tmp_path.iterdir()) == before and "add -o" in said
    code, said, errors = run("data", "show", config, "-o", "p.png", cwd=tmp_path)
    assert code == 0, errors
    assert "Picture: p.png" in said
    assert "a client has exactly 2 classes" in said
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
