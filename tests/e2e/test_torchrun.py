"""Several processes train one run: the same results, ends that are clear, and runs that go on with
other numbers.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedensemble.engines.distributed.launch import job
from fedensemble.errors import InputError
from fedensemble.experiment.storage.ensemble_file import load_ensemble

from .command_line import run

HERE = Path(__file__).parent
CONFIG = """
name = "shared"
rounds = 80
[data]
source = "gaussians"
n = 300
classes = 3
clients = 9
partition = "dirichlet"
alpha = 0.7
[model]
name = "mlp"
hidden = [6]
[algorithm]
name = "scaffold"
lr = 0.02
[ensemble]
modes = 2
strata = 2
clients_per_round = 4
[evaluation]
every = 40
[engine]
dtype = "float64"
"""
# Sums over ranks are rounded in another order, at 1e-16; eighty rounds of local steps multiply that
# by far less
# than a million here. A client whose memory was lost or doubled is off by 1e-3.
AGREEMENT = 1e-9
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
RUN = [sys.executable, "-m", "fedensemble", "run", "shared.toml"]
# A free port for each job, because tests run side by side.
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the config, and in "one" the run of one process that was never interrupted."""
    folder = tmp_path_factory.mktemp("torchrun")
    (folder / "shared.toml").write_text(CONFIG)
    code, _, errors = run("run", "shared.toml", "--out", "one", cwd=folder)
    assert code == 0, errors
    return folder


def finish(command, cwd):
    return subprocess.run(
        command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=120
    )


def start_ranks(arguments, cwd, changes=((), ())):
    """Two ranks without torchrun, so that nobody but themselves ends them; `changes` are options of
    each.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    job = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    return [
        subprocess.Popen(
            [*RUN, *arguments, *changes[rank]],
            cwd=cwd,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**ENVIRONMENT, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]


def finish_ranks(arguments, cwd):
    """What the first of two ranks prints; the launcher, which takes seconds, has a test of its
    own.
    """
    ranks = start_ranks(arguments, cwd)
    said = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    return said[0][0]


def wait_for_checkpoint(folder, process):
    for _ in range(1200):
        if list((folder / "checkpoint").glob("round-*.safetensors")):
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError("no checkpoint in a minute")


def assert_same_run(folder, other):
    """The same rounds and nearly the same numbers."""
    mine, theirs = (
        [json.loads(line) for line in (f / "metrics.jsonl").read_text().splitlines()]
        for f in (folder, other)
    )
    assert len(mine) == len(theirs) == 80
    for one, two in zip(mine, theirs, strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=AGREEMENT)
        assert {**one, "loss": 0, "test": 0, "modes": 0} == {
            **two,
            "loss": 0,
            "test": 0,
            "modes": 0,
        }
    modes, expected = (load_file(f / "modes.safetensors") for f in (folder, other))
    assert set(modes) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(modes[name], value, rtol=AGREEMENT, atol=AGREEMENT)


def test_two_ranks_do_what_one_process_does(tmp_path):
    done = finish([*TORCHRUN, str(HERE / "distributed_checks.py"), str(tmp_path)], tmp_path)
    assert done.returncode == 0, done.stderr
    passed = [json.loads((tmp_path / f"passed-{rank}.json").read_text()) for rank in range(2)]
    assert passed[0] == passed[1] and len(passed[0]) == 38


def test_the_command_line_under_torchrun(place):
    done = finish([*TORCHRUN, "-m", "fedensemble", "run", "shared.toml", "--out", "two"], place)
    assert done.returncode == 0, done.stderr
    assert_same_run(place / "two", place / "one")
    assert done.stdout.count("Run: two") == 1  # rank 0 alone speaks
    configs = [(place / folder / "config.toml").read_text() for folder in ("one", "two")]
    assert configs[0] == configs[1]
    assert json.loads((place / "two" / "env.json").read_text())["ranks"] == 2


def test_two_ranks_calibrate_as_one_process_does(place):
    settings = ["rounds=4", "data.calibration=0.4", "calibration.scope=client"]
    words = [word for text in settings for word in ("--set", text)]
    code, _, errors = run("run", "shared.toml", "--out", "calibrated", *words, cwd=place)
    assert code == 0, errors
    finish_ranks([*words, "--out", "calibrated-by-two"], place)
    one, two = (
        load_ensemble(place / folder).calibration.to_record()
        for folder in ("calibrated", "calibrated-by-two")
    )
    for name in ("temperatures", "nll", "thresholds", "client_thresholds"):
        assert one.pop(name) == pytest.approx(two.pop(name), abs=1e-6), name
    assert one == two


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_is_killed_and_one_process_goes_on(place, victim):
    out = f"killed-{victim}"
    ranks = start_ranks(["--out", out, "--checkpoint-seconds", "0"], place)
    try:
        wait_for_checkpoint(place / out, ranks[0])
        ranks[victim].send_signal(signal.SIGKILL)
        said = ranks[1 - victim].communicate(timeout=60)[1]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert ranks[1 - victim].returncode not in (0, -signal.SIGKILL)
    assert said.startswith(
        f"error: Rank {victim} on {socket.gethostname()} is gone; the run stops."
    )
    assert "start the same command again" in said and "Traceback" not in said
    assert not (place / out / "summary.json").exists()
    if victim == 1:
        newest = max((place / out / "checkpoint").glob("round-*.safetensors"))
        assert f"The checkpoint of round {int(newest.stem[-8:])}" in said

    code, printed, errors = run("run", "shared.toml", "--out", out, cwd=place)
    assert code == 0, errors
    assert f"Continuing {out} after round" in printed
    assert_same_run(place / out, place / "one")


def test_one_process_is_killed_and_two_ranks_go_on(place):
    process = subprocess.Popen(
        [*RUN, "--out", "grown", "--checkpoint-seconds", "0"],
        cwd=place,
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        wait_for_checkpoint(place / "grown", process)
    finally:
        process.kill()
        process.communicate()
    assert not (place / "grown" / "summary.json").exists()
    assert "Continuing grown after round" in finish_ranks(["--out", "grown"], place)
    assert_same_run(place / "grown", place / "one")


def test_ctrl_c_on_one_rank_stops_all_after_the_round(place):
    ranks = start_ranks(["--out", "stopped", "--checkpoint-seconds", "0"], place)
    try:
        wait_for_checkpoint(place / "stopped", ranks[0])
        ranks[1].send_signal(signal.SIGINT)
        said = [rank.communicate(timeout=60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [130, 130]
    assert "run the same command again" in said[0] and not said[1]
    newest = max((place / "stopped" / "checkpoint").glob("round-*.safetensors"))
    assert len((place / "stopped" / "metrics.jsonl").read_text().splitlines()) == int(
        newest.stem[-8:]
    )


def test_what_is_wrong_on_one_rank_is_said_once(place):
    ranks = start_ranks(["--out", "wrong"], place, ([], ["--set", "algorithm.name=fedavgg"]))
    said = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert all(rank.returncode in (1, 2) for rank in ranks)
    assert (
        "Rank 1 on" in said[0] and "did you mean 'fedavg'" in said[0] and "Traceback" not in said[0]
    )
    assert not said[1]  # rank 0 says it for all


def test_compare_is_for_one_process(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    code, _, errors = run("compare", cwd=tmp_path)
    assert code == 2 and "start it without torchrun" in errors


def test_half_a_job_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(InputError, match="RANK"), job():
        pass
