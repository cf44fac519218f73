"""Run folders of every shape a report must cope with, made without training."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedensemble import FederatedData
from fedensemble.config.schema import resolve
from fedensemble.experiment.prediction_summary import (
    compact_bytes,
    describe_clients,
    describe_predictions,
)
from fedensemble.metrics import evaluate, evaluate_modes
from fedensemble.prediction import Prediction

MakeRun = Callable[..., Path]


@pytest.fixture(scope="session")
def make_run(tmp_path_factory: pytest.TempPathFactory) -> MakeRun:
    def make(
        name: str = "made",
        *,
        modes: int = 3,
        classes: int = 4,
        clients: int = 8,
        rounds: int = 30,
        done: bool = True,
        test: bool = True,
        task: str = "classification",
        names: tuple[str, ...] | None = None,
        tokens: int = 0,
        seed: int = 0,
        root: Path | None = None,
    ) -> Path:
        made = torch.Generator().manual_seed(seed)
        folder = (root or tmp_path_factory.mktemp("runs")) / f"{name}-{seed}"
        folder.mkdir(parents=True)
        regression = task == "regression"
        config = resolve(
            {
                "name": name,
                "rounds": max(30, rounds),
                "seed": seed,
                "ensemble": {"modes": modes, "strata": 1},
                "training": {"loss": "mse" if regression else "cross_entropy"},
                "engine": {"device": "cpu"},
                "data": {"clients": 100},
            }
        )
        (folder / "config.toml").write_text(config.toml())
        shape = (200, tokens) if tokens else (200,)
        if regression:
            target = torch.randn(200, 1, generator=made)
            members = target + 0.3 * torch.randn(modes, 200, 1, generator=made)
            prediction = Prediction(members.mean(0), members, "regression", "outputs")
        else:
            target = torch.randint(classes, shape, generator=made)
            logits = torch.randn(modes, *shape, classes, generator=made)
            logits += 2.0 * torch.nn.functional.one_hot(target, classes)
            members = torch.softmax(logits, -1)
            prediction = Prediction(members.mean(0), members)
        results = (
            {"test": evaluate(prediction, target), "modes": evaluate_modes(prediction, target)}
            if test
            else {}
        )
        lines = []
        for number in range(1, rounds + 1):
            record = {
                "round": number,
                "age": 1,
                "loss": 1 / number,
                "visits": 4,
                "modes_trained": 1,
                "bytes_up": 4000,
                "bytes_down": 8000,
            }
            record |= results if number % 5 == 0 else {}
            lines.append(json.dumps(record) + "\n")
        (folder / "metrics.jsonl").write_text("".join(lines))
        y = (
            torch.randn(20 * clients)
            if regression
            else torch.randint(classes, (20 * clients,), generator=made)
        )
        data = FederatedData(
            x=torch.zeros(20 * clients, 1),
            y=y,
            start=20 * torch.arange(clients),
            size=torch.full((clients,), 20),
            classes=None if regression else classes,
            names=names,
            info={"source": "made up", "partition": "iid"},
        )
        (folder / "clients.json").write_bytes(compact_bytes(describe_clients(data)))
        (folder / "env.json").write_text(json.dumps({"torch": "2", "command": ["run", "<b>"]}))
        if done:
            if test:
                (folder / "predictions.json").write_bytes(
                    compact_bytes(describe_predictions(prediction, target))
                )
            summary = {
                "name": name,
                "modes": modes,
                "rounds": rounds,
                "bytes_up": 120000,
                "bytes_down": 240000,
                "seconds": 1.5,
                **({"test": evaluate(prediction, target)} if test else {}),
            }
            (folder / "summary.json").write_text(json.dumps(summary))
        return folder

    return make


SHAPES = {
    "usual": {},
    "one-mode": {"modes": 1},
    "long": {"rounds": 700, "modes": 5},
    "many-modes": {"modes": 80, "classes": 62, "clients": 100},
    "many-classes": {"classes": 150, "clients": 300},
    "two-classes": {"classes": 2, "clients": 2},
    "tokens": {"tokens": 5, "classes": 30},
    "regression": {"task": "regression"},
    "regression-one-mode": {"task": "regression", "modes": 1},
    "no-test-set": {"test": False},
    "unfinished": {"done": False, "rounds": 12},
    "first-round": {"done": False, "rounds": 1, "test": False},
}


@pytest.fixture(scope="session", params=SHAPES)
def shape(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def run_of_shape(shape: str, make_run: MakeRun) -> Path:
    return make_run(shape, **SHAPES[shape])


@pytest.fixture(scope="session")
def comparison(make_run: MakeRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of two rows with a column of the paper's numbers; a label that would be markup
    if it were let.
    """
    root = tmp_path_factory.mktemp("compared")
    rows = {"FedAvg": 1, "<b>Fed-ensemble</b>": 3}
    listed = {
        label: [
            str(make_run(f"k{modes}", modes=modes, seed=seed, root=root / "digits"))
            for seed in (0, 1)
        ]
        for label, modes in rows.items()
    }
    folder = root / "digits" / "compare-0123"
    folder.mkdir(parents=True)
    (folder / "runs.json").write_text(json.dumps(listed))
    (folder / "table.csv").write_text(
        "method,accuracy %,paper\nFedAvg,90.00 ± 1.00,91.5 ± 0.2\n<b>Fed-ensemble</b>,95.00 ± 1.00,–\n"
    )
    return folder
