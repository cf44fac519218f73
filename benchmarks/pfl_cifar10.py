"""pfl-research's CIFAR10 benchmark in pfl and in fedensemble: seconds per iteration in a table.

    python benchmarks/pfl_cifar10.py [--iterations 20] [--device cuda]
                                        [--precision tf32 --precision bf16]

1,000 clients with 50 CIFAR-shaped images each; two 3x3 convolutions, 12,544 -> 128 -> 10 with
dropout; 50 clients per iteration, local SGD with lr 0.1, batch 10, one epoch; the server takes the
average (server lr 1). pfl is measured if it is installed: `pip install pfl==0.6.0`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

import fedensemble as fe
from fedensemble.bench.timing import LiveTable, machine, say, synchronize, write
from fedensemble.models import models

CLIENTS, IMAGES, COHORT, BATCH, LR = 1000, 50, 50, 10, 0.1


def clients_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Images [clients, images, 3, 32, 32] and labels."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(CLIENTS, IMAGES, 3, 32, 32, generator=generator)
    return x, torch.randint(0, 10, (CLIENTS, IMAGES), generator=generator)


def model() -> nn.Module:
    """Pfl's `simple_cnn`."""
    return models["cnn-pfl"](shape=(3, 32, 32), outputs=10)


def fedensemble_iterations(
    device: str, iterations: int, modes: int, options: dict[str, object]
) -> list[float]:
    """Seconds of each iteration of fedensemble."""
    x, y = clients_data()
    data = fe.FederatedData.from_arrays(
        x.flatten(0, 1), y.flatten(), [IMAGES] * CLIENTS, classes=10
    )
    federation = fe.Federation(
        model,
        data,
        fe.FedAvg(lr=LR),
        modes=modes,
        clients_per_round=COHORT,
        batch_size=BATCH,
        device=device,
        engine_options=options,
    )
    return time_calls(lambda: list(federation.rounds(1)), device, iterations)


def time_calls(call: Callable[[], object], device: str, count: int) -> list[float]:
    """Seconds of each call."""
    seconds = []
    for _ in range(count):
        synchronize(device)
        started = time.perf_counter()
        call()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return seconds


def pfl_iterations(device: str, iterations: int) -> list[float]:
    """Seconds of each of pfl's central iterations."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def loss(self, x, y, eval=False):  # type: ignore[no-untyped-def]
            self.train(not eval)
            return nn.functional.cross_entropy(self.net(x), y)

        def metrics(self, x, y, eval=False):  # type: ignore[no-untyped-def]
            with torch.no_grad():
                return {"loss": Weighted(float(self.loss(x, y, eval)) * len(y), len(y))}

    seconds: list[float] = []

    class Clock(TrainingProcessCallback):
        def __init__(self) -> None:
            self.before = time.perf_counter()

        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):  # type: ignore[no-untyped-def]
            synchronize(device)
            seconds.append(time.perf_counter() - self.before)
            self.before = time.perf_counter()
            return False, Metrics()

    x, y = (values.to(device) for values in clients_data())
    users = list(range(CLIENTS))
    data = FederatedDataset(
        lambda user: Dataset((x[user], y[user]), user_id=user), get_user_sampler("random", users)
    )
    network = Network().to(device)
    trained = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=iterations,
            evaluation_frequency=iterations + 1,
            train_cohort_size=COHORT,
            val_cohort_size=1,
        ),
        backend=SimulatedBackend(training_data=data, val_data=data),
        model=trained,
        model_train_params=NNTrainHyperParams(
            local_learning_rate=LR, local_num_epochs=1, local_batch_size=BATCH
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=IMAGES),
        callbacks=[Clock()],
        send_metrics_to_platform=False,
    )
    return seconds


def main() -> None:
    """Measures both libraries and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--iterations", type=int, default=0, help="by default 20 on a GPU, 3 on a CPU"
    )
    parser.add_argument(
        "--precision", action="append", help="float32, tf32 or bf16; may be repeated"
    )
    parser.add_argument("--out", type=Path, help="also write the table as JSON")
    options = parser.parse_args()
    cuda = options.device.startswith("cuda")
    count = 1 + (options.iterations or (20 if cuda else 3))  # the first warms up
    try:
        peer = f"pfl {version('pfl')}"
    except PackageNotFoundError:
        peer = "pfl is not installed"
    header = ("way", "s an iteration", "fastest", "first", "ratio to the first line")
    table = LiveTable(
        f"pfl-research's CIFAR10 benchmark. {machine(options.device)}; {peer}", header, say
    )
    base: float | None = None
    if find_spec("pfl") is not None:
        base = add_row(table, peer, pfl_iterations(options.device, count), None)
    for modes in (1, 5):
        for precision in options.precision or (("tf32", "bf16") if cuda else ("auto",)):
            way = f"fedensemble, {modes} mode{'s' * (modes > 1)}" + (
                f", {precision}" if cuda else ""
            )
            seconds = fedensemble_iterations(options.device, count, modes, {"precision": precision})
            median = add_row(table, way, seconds, base)
            base = base or median
    write(options.out, options.device, [table])


def add_row(table: LiveTable, way: str, seconds: list[float], base: float | None) -> float:
    """Adds a row; returns the median of all iterations but the first."""
    steady = sorted(seconds[1:])
    median = steady[len(steady) // 2]
    table.add(
        way,
        f"{median:.4f}",
        f"{steady[0]:.4f}",
        f"{seconds[0]:.2f}",
        f"{base / median:.1f}" if base else "1",
    )
    return median


if __name__ == "__main__":
    main()
