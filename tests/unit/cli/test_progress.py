"""The display of progress says what a long first round does."""

from io import StringIO

import pytest
import torch
from rich.console import Console

from fedensemble.cli import progress
from fedensemble.cli.progress import COMPILING, PLAIN_LINES, ProgressDisplay
from fedensemble.config.schema import Config
from fedensemble.core.types import Plan, RoundReport


@pytest.mark.parametrize(
    ("device", "done", "said"),
    [("cuda", 0, True), ("cuda:1", 3, True), ("cuda", 10, False), ("cpu", 0, False)],
)
def test_the_first_round_on_a_gpu_compiles_kernels(device, done, said):
    text = StringIO()
    display = ProgressDisplay(Console(file=text), runs=2)
    config = Config(rounds=10, engine={"device": device})
    for label in ("one", "two"):
        display.callbacks(label).on_train_start(config, done)
    assert text.getvalue().count(COMPILING) == said  # once for all runs
    assert all((task.fields["note"] == COMPILING) == said for task in display.bar.tasks[2:])


@pytest.mark.parametrize("terminal", [True, False])
def test_bars_are_updated_a_few_times_per_second_and_after_the_last_round(monkeypatch, terminal):
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    text = StringIO()
    display = ProgressDisplay(Console(file=text, force_terminal=terminal, width=100), runs=2)
    callbacks = display.callbacks("trial")
    callbacks.on_train_start(Config(rounds=100), 0)
    shown = []
    for number in range(1, 101):
        report = RoundReport(number, 1, Plan(torch.zeros(1), torch.zeros(1)), 0.5, None, 1, 1, ())
        callbacks.on_round_end(report, {})
        shown.append(display.bar.tasks[-1].completed)
        now += 0.03
    if terminal:
        assert shown[:9] == [1, 1, 1, 1, 5, 5, 5, 5, 9] and shown[-1] == 100
    else:
        printed = [line for line in text.getvalue().splitlines() if line.startswith("trial: round")]
        assert len(printed) == PLAIN_LINES and printed[-1] == "trial: round 100/100  loss 0.500"
