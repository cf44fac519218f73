"""Time to 95 % of the final accuracy: our vector engine and Flower's simulation on one device.

    python benchmarks/time_to_accuracy.py [--device cuda] [--rounds 60] [--every 2] [--repeats 1]

FedAvg on MNIST: 100 clients with Dirichlet shares of 0.3, the paper's CNN, 10 clients per round,
batch 32, one epoch. Both train the same clients' data and test the same images in the same rounds.
Each program runs in a process of its own, and its time starts with the process, so that imports,
compilation and the start of Ray count. Flower has the settings that were fastest: all clients of a
round train side by side and share the GPU, and each Ray actor keeps the data of its clients on it.
Flower is measured if it is installed with its Ray backend: `pip install "flwr[simulation]"`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cpu_flower import network

CLIENTS, COHORT, BATCH, LR, SHARE = 100, 10, 32, 0.05, 0.95
FOLDER = "TIME_TO_ACCURACY_DATA"  # the environment variable with the folder of the files
Tests = list[tuple[float, int, float]]  # time, round, accuracy


def write_data(folder: Path, source: str) -> None:
    """Writes the images, labels and sizes of all clients, and the test set."""
    import numpy as np
    import torch

    from fedensemble.data import load, partition

    options = {"channels": 1, "side": 28, "n": 6000} if source == "stand-in-images" else {}
    data = partition(load(source, **options), "dirichlet", clients=CLIENTS, seed=0, alpha=0.3)
    arrays = {
        "x": data.inputs(data.x, torch.float32),
        "y": data.y,
        "sizes": data.size,
        "x_test": data.inputs(data.x_test, torch.float32),
        "y_test": data.y_test,
    }
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", values.numpy())


def read(name: str) -> Any:
    """An array of the files, memory-mapped."""
    import numpy as np

    return np.load(Path(os.environ[FOLDER]) / f"{name}.npy", mmap_mode="r")


def vector(rounds: int, every: int, device: str) -> Tests:
    """Trains with engine `vector`; with one mode it is FedAvg."""
    import fedensemble as fe

    names = ("x", "y", "sizes")
    data = fe.FederatedData.from_arrays(
        *(read(name) for name in names), x_test=read("x_test"), y_test=read("y_test"), classes=10
    )
    federation = fe.Federation(
        network,
        data,
        fe.FedAvg(lr=LR),
        modes=1,
        clients_per_round=COHORT,
        batch_size=BATCH,
        device=device,
        engine="vector",
    )
    tests = []
    for report in federation.rounds(rounds):
        if report.round % every == 0:
            accuracy = federation.evaluate(batch_size=len(data.x_test))["accuracy"]
            tests.append((time.time(), report.round, accuracy))
    return tests


@lru_cache(maxsize=CLIENTS)
def client_data(client: int, device: str) -> Any:
    """The images and labels of a client on the device, cached by each actor."""
    import torch

    sizes = read("sizes")
    first = int(sizes[:client].sum())
    rows = slice(first, first + int(sizes[client]))
    return tuple(torch.tensor(read(name)[rows], device=device) for name in ("x", "y"))


def train(model: Any, client: int, device: str) -> dict[str, float]:
    """Trains a client for one epoch; returns the last loss and the number of its examples."""
    import torch

    x, y = client_data(client, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    model.train()
    for rows in torch.randperm(len(x), device=device).split(BATCH):
        loss = torch.nn.functional.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {"train_loss": float(loss.detach()), "num-examples": len(x)}


def flower(rounds: int, every: int, device: str) -> Tests:
    """Trains with Flower's simulation and its FedAvg."""
    import torch
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client_app, server_app = ClientApp(), ServerApp()

    @client_app.train()
    def fit(message: Message, context: Context) -> Message:
        model = network().to(device)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        metrics = train(model, int(context.node_config["partition-id"]), device)
        arrays = ArrayRecord({name: value.cpu() for name, value in model.state_dict().items()})
        content = RecordDict({"arrays": arrays, "metrics": MetricRecord(metrics)})
        return Message(content=content, reply_to=message)

    tests: Tests = []

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        x, y = (torch.tensor(read(name), device=device) for name in ("x_test", "y_test"))
        model = network().to(device).eval()

        def test(round: int, arrays: ArrayRecord) -> None:
            if round and round % every == 0:
                model.load_state_dict(arrays.to_torch_state_dict())
                with torch.inference_mode():
                    accuracy = float((model(x).argmax(1) == y).float().mean())
                tests.append((time.time(), round, accuracy))

        strategy = FedAvg(
            fraction_train=COHORT / CLIENTS, fraction_evaluate=0.0, min_available_nodes=CLIENTS
        )
        start = ArrayRecord(network().state_dict())
        result = strategy.start(grid, start, num_rounds=rounds, evaluate_fn=test)
        if sum(bool(metrics) for metrics in result.train_metrics_clientapp.values()) < rounds:
            tests.clear()  # it goes on without the clients that fail

    gpus = 1 / COHORT if device == "cuda" else 0.0
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": gpus}}
    run_simulation(server_app, client_app, num_supernodes=CLIENTS, backend_config=resources)
    if not tests:
        raise SystemExit("Flower's clients failed; see Flower's output above.")
    return tests


WAYS: dict[str, tuple[str, Callable[[int, int, str], Tests]]] = {
    "vector": ("fedensemble, engine vector", vector),
    "flower": ("Flower's simulation, from Python", flower),
}


def run_alone(way: str, options: argparse.Namespace, folder: str) -> tuple[float, Tests]:
    """Runs a program in a process of its own; returns its start time and its tests."""
    # Users do not set this variable: without cached bytecode every import would be slower.
    usual = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    settings = {
        **usual,
        FOLDER: folder,
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
    }
    command = [sys.executable, __file__, "--one", way, "--device", options.device]
    command += ["--rounds", str(options.rounds), "--every", str(options.every)]
    started = time.time()
    done = subprocess.run(command, capture_output=True, text=True, env=settings, check=False)
    if done.returncode or not done.stdout.strip():
        sys.exit(f"{way} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return started, [tuple(test) for test in json.loads(done.stdout.splitlines()[-1])]


def main() -> None:
    """Measures both programs and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--every", type=int, default=2, help="rounds between two tests")
    parser.add_argument("--repeats", type=int, default=1, help="the median counts")
    parser.add_argument("--source", default="mnist", help="mnist, or stand-in-images for a try")
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        # As a module and not as __main__, because Ray's workers import what clients call by name.
        import time_to_accuracy

        way = time_to_accuracy.WAYS[options.one][1]
        tests = way(options.rounds, options.every, options.device)
        print(json.dumps(tests), flush=True)
        return
    from statistics import mean, median

    from fedensemble.bench.timing import machine

    wanted = ["vector"]
    if find_spec("flwr") is not None and find_spec("ray") is not None:
        wanted.append("flower")
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder), options.source)
        turns = [
            {way: run_alone(way, options, folder) for way in wanted} for _ in range(options.repeats)
        ]
    final = {way: mean(test[2] for turn in turns for test in turn[way][1][-3:]) for way in wanted}
    target = SHARE * min(final.values())
    print(f"{options.rounds} rounds, {machine(options.device)}. Target: {100 * target:.2f} %\n")
    print("| way | final accuracy % | rounds to target | seconds to target | all rounds, s |")
    print("| --- | ---: | ---: | ---: | ---: |")
    seconds = {}
    for way in wanted:
        reached = [
            next((at - started, round) for at, round, accuracy in tests if accuracy >= target)
            for started, tests in (turn[way] for turn in turns)
        ]
        whole = median(tests[-1][0] - started for started, tests in (turn[way] for turn in turns))
        seconds[way] = median(time for time, _ in reached)
        rounds = median(round for _, round in reached)
        cells = [f"{100 * final[way]:.2f}", f"{rounds:g}", f"{seconds[way]:.1f}", f"{whole:.1f}"]
        print(f"| {WAYS[way][0]} | {' | '.join(cells)} |")
    if len(wanted) == 2:
        print(f"\nFlower takes {seconds['flower'] / seconds['vector']:.1f} times as long.")


if __name__ == "__main__":
    main()
