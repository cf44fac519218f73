"""The settings a fleet starts with: what they refuse, what the operator is told, and what is left
in the folder.
"""

import json

import pytest
import torch

pytest.importorskip("flwr")

from fedensemble.config.schema import resolve
from fedensemble.deploy.app_spec import read_app_spec
from fedensemble.deploy.generate import write_app
from fedensemble.deploy.safeguards import (
    build_limits,
    cohort_notes,
    small_cohort_share,
    weight_notes,
)
from fedensemble.deploy.server import run_fleet
from fedensemble.deploy.server_settings import Settings
from fedensemble.engines.flower.messages import RESULT, UPLOAD, pack, unpack
from fedensemble.errors import InputError
from fedensemble.schedules import Balanced, Independent, Stratified

from .test_deploy import VALUES, grid_of
from .test_refusals import change


def start(tmp_path, bend=None, grid=None, values=VALUES, **given):
    """A fleet with the settings it has by default; gives its records, and its grid."""
    app = tmp_path / "app"
    if not app.exists():
        write_app(resolve(values), app)
    grid = grid or grid_of(app)
    if bend is not None:
        grid.nodes[11].bend = bend
    told = {
        "run-dir": str(tmp_path / "run"),
        "clients": 3,
        "poll": 0.01,
        "identity": "partition",
        "timeout": 5.0,
        **given,
    }
    run_fleet(grid, read_app_spec(app / "fleet"), told)
    return [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ], grid


# A schedule whose plans leave no mode with a single client that replies, in these few rounds.
FLOAT32 = {
    **VALUES,
    "ensemble": {**VALUES["ensemble"], "schedule": "stratified"},
    "rounds": 6,
    "algorithm": {"name": "fedavg"},
    "engine": {"name": "loop", "device": "cpu"},
}


@pytest.mark.parametrize("loss", [1e39, -0.5, float("nan")])
def test_no_loss_ends_a_run(tmp_path, loss):
    records, _ = start(tmp_path, change(RESULT, loss=loss), values=FLOAT32)
    assert [record["round"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert all(record["loss"] is not None and 0 < record["loss"] < 10 for record in records)
    assert records[2]["fleet"]["suspended"] == {"partition-1": 2} and records[3]["fleet"][
        "skipped"
    ] == ["partition-1"]
    assert (tmp_path / "run" / "summary.json").exists()


def test_a_run_continued_after_a_stop_has_the_same_suspensions(tmp_path, monkeypatch):
    from fedensemble.experiment.storage.run_folder import RunFolder

    bend, plain = change(RESULT, loss=-1.0), RunFolder.save
    whole, _ = start(tmp_path / "whole", bend, values=FLOAT32)

    def save(store, tensors, round, facts):
        plain(store, tensors, round, facts)
        if round == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save", save)
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path / "stopped", bend, values=FLOAT32)
    again, _ = start(tmp_path / "stopped", bend, values=FLOAT32)
    assert again == whole and any("skipped" in record["fleet"] for record in whole[4:])


def test_poison_is_refused_by_default(tmp_path):
    def flip(message, answer):
        tree = unpack(answer.content, UPLOAD)
        answer.content[UPLOAD] = pack({name: value - 1e3 for name, value in tree.items()})
        return [answer]

    records, _ = start(tmp_path, flip, values=FLOAT32)
    assert all(
        "times as much" in record["fleet"]["refused"]["partition-1"] for record in records[:3]
    )
    assert records[-1]["loss"] < records[0]["loss"]


def test_a_fleet_in_which_no_mode_could_be_updated_says_so(tmp_path):
    ensemble = {"modes": 3, "schedule": "balanced", "clients_per_round": 3}
    with pytest.raises(InputError, match=r"no mode ever has 2 clients.*min-cohort"):
        start(tmp_path, values={**FLOAT32, "ensemble": ensemble})
    records, _ = start(tmp_path, **{"min-cohort": 1})
    assert all(record["modes_trained"] == 3 for record in records)


def test_small_cohorts_are_foreseen():
    for schedule, share in [
        (Balanced(modes=5, strata=5, clients_per_round=10), 0.0),
        (Balanced(modes=10, strata=10, clients_per_round=10), 1.0),
        (Independent(modes=3, clients_per_round=2), 0.0),
    ]:
        assert small_cohort_share(schedule, schedule.init(50, 0), 2) == share
    loose = Stratified(modes=5, strata=10, clients_per_round=10)
    planned = loose.init(50, 0)
    # Ten clients choose among five modes: a client is alone with probability (4/5) ** 9.
    assert small_cohort_share(loose, planned, 2) == pytest.approx(0.8**9, abs=0.08)
    [words] = cohort_notes(loose, planned, 2)
    assert "10 clients per round and 5 modes" in words and "balanced" in words
    assert cohort_notes(loose, planned, 1) == []


def test_claims_of_examples_are_told_at_the_start():
    names, sizes = ["a", "b", "c", "d"], torch.tensor([10, 12, 9, 10_000_000])
    [words] = weight_notes(names, sizes, sizes.clamp(max=30).double())
    assert "d (10000000, counts as 30)" in words and "max-weight" in words
    [words] = weight_notes(names, sizes, sizes.double())
    assert "d has 100% of the fleet's weight" in words and "uniform" in words
    assert (
        weight_notes(names, torch.tensor([10, 12, 9, 14]), torch.tensor([10.0, 12.0, 9.0, 14.0]))
        == []
    )


def test_zero_turns_a_limit_off():
    settings = Settings.read(
        {"clip-factor": 0, "refuse-factor": 0, "max-weight": 0, "suspend-after": 0}
    )
    limits = build_limits(settings, "mse")
    assert (limits.clip_factor, limits.refuse_factor, limits.max_weight, limits.suspend_after) == (
        None,
    ) * 4
    assert (
        limits.min_loss == 0
        and build_limits(settings, lambda outputs, targets: outputs).min_loss < 0
    )
