"""A loss that explodes without becoming NaN is reported, and a healthy noisy run never is."""

import math
import random

import pytest
import torch

from fedensemble.config.build import build_data, build_federation
from fedensemble.config.schema import resolve
from fedensemble.experiment.run import RunCallbacks, run
from fedensemble.experiment.storage.divergence import (
    FACTOR,
    PATIENCE,
    DivergenceMonitor,
    untrained_loss,
)
from fedensemble.experiment.storage.run_folder import RunFolder
from fedensemble.report.html.page import run_page
from fedensemble.report.run_report import write_report
from fedensemble.report.tables.run_row import run_record

SETTINGS = {
    "data": {"source": "gaussians", "n": 200, "n_test": 40, "classes": 4, "clients": 8},
    "model": {"name": "mlp", "hidden": []},
    "ensemble": {"modes": 2, "strata": 2, "clients_per_round": 4},
    "evaluation": {"every": 2},
    "engine": {"device": "cpu"},
}


def verdicts(losses, rounds=100, reference=2.0):
    """Whether the run has diverged after each round."""
    monitor = DivergenceMonitor(reference, rounds)
    found = []
    for loss in losses:
        monitor.observe(loss)
        found.append(bool(monitor.message))
    return found


def test_all_of_the_latest_rounds_count():
    high, low = 3 * FACTOR, 1.0
    assert verdicts([low] * 3 + [high] * PATIENCE) == [False] * (2 + PATIENCE) + [True]
    assert verdicts([high] * PATIENCE + [low]) == [False] * (PATIENCE - 1) + [True, False], (
        "recovered"
    )
    assert not any(verdicts([high] * (PATIENCE - 1) + [low] + [high] * (PATIENCE - 1)))
    assert verdicts([high] * PATIENCE + [None]) == [False] * (PATIENCE - 1) + [True, True]
    assert verdicts([high], rounds=1) == [True] and verdicts([high] * 2, rounds=3) == [False, False]


def test_rounds_before_a_checkpoint_count():
    earlier = [1e9] * (PATIENCE - 1)
    monitor = DivergenceMonitor(2.0, 100, earlier)
    assert not monitor.message
    monitor.observe(1e9)
    assert "the training loss has exploded: 1e+09" in monitor.message
    assert "Lower algorithm.lr" in monitor.message


def test_noise_and_spikes_are_healthy():
    """Heavy-tailed noise: each tenth round a hundred times the loss, some a hundred thousand."""
    draw = random.Random(0)
    losses = [draw.lognormvariate(0, 3) for _ in range(20_000)]
    assert sum(loss > 2 * FACTOR for loss in losses) > 100
    assert not any(verdicts(losses))


@pytest.mark.parametrize(
    ("settings", "least", "most"),
    [
        ({}, math.log(4), 3.0),
        ({"data": {"source": "sine", "clients": 4}, "training": {"loss": "mse"}}, 1e-3, 1e3),
    ],
)
def test_the_reference_is_the_loss_of_a_model_that_has_learned_nothing(settings, least, most):
    config = resolve({**SETTINGS, **settings})
    before = torch.get_rng_state()
    federation = build_federation(config, build_data(config))
    assert least <= untrained_loss(federation) <= most
    assert torch.equal(before, torch.get_rng_state())


def test_large_inputs_raise_the_reference():
    """An untrained model may have a large loss, from which a healthy run comes down."""
    config = resolve(SETTINGS)
    data = build_data(config)
    usual = untrained_loss(build_federation(config, data))
    data.x.mul_(1e6)
    assert untrained_loss(build_federation(config, data)) > 1000 * usual


def exploding(rounds: int, lr: float = 1e6):
    return resolve({**SETTINGS, "rounds": rounds, "algorithm": {"name": "fedavg", "lr": lr}})


def test_a_run_that_explodes_is_finished_and_diverged(tmp_path):
    said: list[str] = []
    config = exploding(7)
    summary = run(config, tmp_path, RunCallbacks(on_message=said.append))
    store = RunFolder(tmp_path)
    assert min(record["loss"] for record in store.metrics()[2:]) > 1000 * math.log(4)
    warnings = [text for text in said if text.startswith("warning: ")]
    assert len(warnings) == 1 and "exploded" in warnings[0] and "Training continues" in warnings[0]
    # Nothing is missing: all rounds, the modes, the summary.
    assert len(store.metrics()) == 7 and store.done and store.modes_file.exists()
    assert "exploded" in summary["diverged"] and store.state == "diverged"
    assert store.summary()["diverged"] == summary["diverged"] == store.divergence()
    record = run_record(store)
    assert record["state"] == "diverged" and record["rounds"] == "7/7" and record["result"]
    assert write_report(tmp_path).title.endswith("(diverged)")
    assert "Diverged: the training loss has exploded" in (tmp_path / "report.md").read_text()
    assert "Diverged: the training loss has exploded" in run_page(tmp_path)
    # The same command again says so again, and more rounds do not lose the verdict.
    assert run(config, tmp_path)["diverged"] == summary["diverged"]
    assert "exploded" in run(exploding(9), tmp_path)["diverged"]


def test_a_run_that_is_killed_before_its_summary_keeps_the_verdict(tmp_path):
    config = exploding(7)
    run(config, tmp_path)
    for name in ("summary.json", "diverged.json", "checksums.json"):
        (tmp_path / name).unlink()
    assert "exploded" in run(config, tmp_path)["diverged"]


def test_a_healthy_run_is_done(tmp_path):
    config = exploding(7, lr=0.5)
    said: list[str] = []
    assert "diverged" not in run(config, tmp_path, RunCallbacks(on_message=said.append))
    assert RunFolder(tmp_path).state == "done" and not RunFolder(tmp_path).divergence()
    assert not [text for text in said if "warning" in text]
