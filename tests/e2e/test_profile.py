"""`fedensemble run --profile` says where a round's time went, and changes nothing else."""

import json
import os
import subprocess
import sys

import pytest

from fedensemble.config.schema import resolve
from fedensemble.engines.local.local_engine import LocalEngine
from fedensemble.engines.local.loop import LoopEngine
from fedensemble.errors import DivergedError
from fedensemble.experiment import run as running
from fedensemble.experiment.profile import FILE, PHASES, Profile, profiling
from fedensemble.experiment.storage.run_folder import RunFolder
from fedensemble.federation.federation import Federation
from fedensemble.report.tables.profile_tables import profile_tables

SMALL = {
    "rounds": 4,
    "data": {"source": "digits", "clients": 10},
    "model": {"name": "mlp", "hidden": [4]},
    "ensemble": {"modes": 2, "clients_per_round": 2},
    "evaluation": {"every": 2},
    "engine": {"device": "cpu"},
}


@pytest.mark.parametrize("engine", ["vector", "loop"])
def test_phases_and_the_same_results(tmp_path, engine):
    config = resolve({**SMALL, "engine": {"device": "cpu", "name": engine}})
    with profiling() as profile:
        running.run(config, tmp_path / "a")
    running.run(config, tmp_path / "b")
    facts = profile.write(tmp_path / "a")
    assert json.loads((tmp_path / "a" / FILE).read_text()) == facts
    assert tuple(facts["phases"]) == PHASES
    assert all(part["ms"] > 0 for part in facts["phases"].values()), facts["phases"]
    assert sum(part["share"] for part in facts["phases"].values()) == pytest.approx(1)
    assert facts["rounds"] == 3  # of four, one is recorded
    assert any(event["name"].startswith("aten::") for event in facts["operations"])
    for name in ("metrics.jsonl", "modes.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert json.loads((tmp_path / "a" / "env.json").read_text())["precision"] == "float32"
    tables = profile_tables(facts)
    assert [row[0] for row in tables[0].rows] == list(PHASES)


QUIET = """
from pathlib import Path
from fedensemble.experiment import run as running
from fedensemble.config.schema import resolve
from fedensemble.experiment.profile import profiling
with profiling() as profile:
    running.run(resolve(%r), Path(%r))
assert profile.operations
"""


def test_torchs_profiler_keeps_quiet(tmp_path):
    """In a process of its own: what it prints is decided at its first use."""
    settings = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    code = [sys.executable, "-c", QUIET % (SMALL, str(tmp_path))]
    done = subprocess.run(code, capture_output=True, text=True, env=settings)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def methods():
    return [
        *(
            vars(kind).get(name)
            for kind in (LocalEngine, LoopEngine)
            for name in ("run_visits", "prepare", "train")
        ),
        Federation.next_request,
        Federation.run_round,
        running.evaluate_run,
        RunFolder.save,
        RunFolder.append_metrics,
    ]


def test_functions_are_as_before_even_after_a_failure(tmp_path):
    before = methods()
    config = resolve({**SMALL, "algorithm": {"name": "fedavg", "lr": 1e30}})
    with profiling():
        assert methods() != before
    with pytest.raises(DivergedError), profiling():
        running.run(config, tmp_path)
    assert methods() == before


def test_a_phase_inside_another_is_not_counted_twice(monkeypatch):
    profile, clock = Profile(), iter(range(100))
    monkeypatch.setattr(profile, "now", lambda: float(next(clock)))
    inner = profile.wrapped(lambda: None, "local training")
    profile.wrapped(lambda: (inner(), inner()), "aggregation")()
    assert profile.seconds == {"aggregation": 3.0, "local training": 2.0}


def test_on_the_command_line(tmp_path, capsys, monkeypatch):
    from fedensemble.cli.main import app

    settings = [
        "--set",
        "rounds=2",
        "--set",
        "ensemble.clients_per_round=2",
        "--set",
        "ensemble.modes=2",
        "--set",
        "ensemble.strata=2",
    ]
    app(
        ["run", *settings, "--out", str(tmp_path / "run"), "--device", "cpu", "--profile"],
        standalone_mode=False,
    )
    said = capsys.readouterr().out
    assert "| local training |" in said
    assert (tmp_path / "run" / FILE).exists()
    app(
        ["run", *settings, "--out", str(tmp_path / "run"), "--device", "cpu", "--profile"],
        standalone_mode=False,
    )
    said = capsys.readouterr().out
    assert "| local training |" not in said  # a finished run has no rounds to look at
    assert f"There was nothing to profile: all 2 rounds of {tmp_path / 'run'} were trained" in said
    assert "To profile more rounds, raise rounds" in said
