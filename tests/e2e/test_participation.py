"""Stragglers on the command line: records, reports, a run that is cut off, and settings that cannot
be.
"""

import json
from pathlib import Path

import pytest

from fedensemble.config.build import resolve_device
from fedensemble.config.schema import resolve
from fedensemble.config.toml import read_toml
from fedensemble.experiment.run import RunCallbacks, run

from .command_line import run as fedensemble
from .test_cli import SMALL, trained_bytes

DEVICES = """
[participation]
ask = 9
drop = 0.2
least_hours = 12
most_hours = 20
factor = 3000
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "devices.toml").write_text(SMALL.format(rounds=12) + DEVICES)
    (tmp_path / "small.toml").write_text(SMALL.format(rounds=3))
    (tmp_path / "trace.csv").write_text("compute_ms_per_sample,bandwidth_kbps\n30,5000\n60,900\n")
    return tmp_path


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_records_and_report(folder: Path) -> None:
    code, output, errors = fedensemble("run", "devices.toml", "--out", "a", cwd=folder)
    assert code == 0, errors
    assert "simulated time, h" in output and "clock" in output
    told = records(folder / "a")
    clock = 0.0
    for record in told:
        clock += record["round_seconds"]
        assert record["clock"] == pytest.approx(clock)
        assert record["asked"] == record["visits"] + record["late"] + record["dropped"]
    assert json.loads((folder / "a" / "summary.json").read_text())["clock"] == told[-1]["clock"]
    report = (folder / "a" / "report.md").read_text()
    assert "## Time to accuracy" in report and "| simulated hours |" in report


def test_every_round_without_an_answer(folder: Path) -> None:
    code, output, errors = fedensemble(
        "run", "devices.toml", "--out", "a", "--set", "participation.drop=1", cwd=folder
    )
    assert code == 0, errors
    assert "no replies" in output and "rounds without a reply" in output
    assert all(record["loss"] is None and record["visits"] == 0 for record in records(folder / "a"))
    assert "NaN" not in (folder / "a" / "metrics.jsonl").read_text()
    assert fedensemble("report", "a", cwd=folder)[0] == 0


def test_without_participation_nothing_is_added(folder: Path) -> None:
    code, output, errors = fedensemble("run", "small.toml", "--out", "a", cwd=folder)
    assert code == 0, errors
    assert not {"clock", "asked", "late"} & set(records(folder / "a")[0])
    assert "participation" not in (folder / "a" / "config.toml").read_text()
    assert "simulated" not in output


@pytest.mark.parametrize("trace", ["", "trace.csv"], ids=["log-normal", "trace"])
def test_a_run_that_is_cut_off_ends_with_the_same_bytes(folder: Path, trace: str) -> None:
    values = read_toml(folder / "devices.toml")
    if trace:
        values["participation"]["trace"] = str(folder / trace)
    config = resolve_device(resolve(values))
    run(config, folder / "whole")

    class CutError(Exception):
        pass

    def cut(report, metrics):
        if report.round == 7:
            raise CutError

    with pytest.raises(CutError):
        run(config, folder / "cut", RunCallbacks(on_round_end=cut), checkpoint_seconds=0)
    said: list[str] = []
    run(config, folder / "cut", RunCallbacks(on_message=said.append))
    assert any("Continuing" in text for text in said)
    assert trained_bytes(folder / "cut") == trained_bytes(folder / "whole")


def test_engines_write_the_same_clock(folder: Path) -> None:
    clocks = []
    for engine in ("loop", "vector"):
        assert (
            fedensemble(
                "run", "devices.toml", "--out", engine, "--set", f"engine.name={engine}", cwd=folder
            )[0]
            == 0
        )
        clocks.append(
            [(r["clock"], r["asked"], r["late"], r["dropped"]) for r in records(folder / engine)]
        )
    assert clocks[0] == clocks[1]


def test_compare_has_a_column_and_a_picture_of_time(folder: Path) -> None:
    code, output, errors = fedensemble(
        "compare",
        "devices.toml",
        "--modes",
        "1,2",
        "--seeds",
        "0,1",
        "--set",
        "rounds=6",
        "--set",
        "ensemble.strata=3",
        cwd=folder,
    )
    assert code == 0, errors
    assert "simulated time, h" in output and "%, h" in output
    (table,) = (folder / "runs").glob("*/compare-*/report.md")
    assert "time.png" in table.read_text() and (table.parent / "time.png").exists()


def test_participations_are_listed(folder: Path) -> None:
    code, output, _ = fedensemble("ls", "participations", cwd=folder)
    assert code == 0 and "devices" in output and "everybody" in output


BAD = [
    (["participation.ask=5"], "needs ask >= clients_per_round; got ask=5, clients_per_round=6"),
    (["participation.ask=13"], "needs ask <= clients; got ask=13, clients=12"),
    (["participation.asks=9"], "participation.asks: unknown key 'asks': did you mean 'ask'?"),
    (["participation.name=devises"], "unknown participation 'devises': did you mean 'devices'?"),
    (["participation.drop=2"], "needs 0 <= drop <= 1; got 2"),
    (["participation.drop=often"], "participation.drop: input should be a valid number"),
    (["participation.trace=none.csv"], "Cannot read participation.trace none.csv"),
    (
        ["participation.trace=small.toml"],
        "small.toml needs the columns compute_ms_per_sample and bandwidth_kbps",
    ),
    (
        ["participation.least_hours=9", "participation.most_hours=8"],
        "0 < least_hours <= most_hours <= 24; got 9.0 and",
    ),
    (["participation=7"], "participation: must be a table of settings; got 7"),
    (
        ["participation.name=everybody", "participation.ask=9"],
        "participation.ask: unknown key 'ask'",
    ),
]


@pytest.mark.parametrize(("settings", "message"), BAD, ids=[" ".join(s) for s, _ in BAD])
def test_bad_settings(folder: Path, settings: list[str], message: str) -> None:
    sets = [part for setting in settings for part in ("--set", setting)]
    code, _, errors = fedensemble("run", "small.toml", *sets, cwd=folder)
    assert code == 2, errors
    assert message in errors and "Traceback" not in errors
    assert not list((folder / "runs").glob("**/metrics.jsonl"))
