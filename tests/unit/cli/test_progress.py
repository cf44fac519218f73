"""The display of progress says what a long first round does."""

from io import StringIO

import pytest
from rich.console import Console

from fedensemble.cli.progress import COMPILING, ProgressDisplay
from fedensemble.config.schema import Config


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
