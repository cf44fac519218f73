"""FedAvg on a CPU: our engines, a plain torch loop and Flower's simulation in one table.

    python benchmarks/cpu_flower.py [--rounds 5] [--threads 2] [--repeats 3] [--only vector,flower]

100 clients with 600 MNIST-shaped images each, the paper's CNN, 10 clients per round, batch 32, one
epoch. Each program runs in its own process and reads the images from files. "total" is the time of
that process from start to end, including imports; "steady" is the fastest round after the first.
With repeats, the programs take turns, and the table has the median of each. Flower is measured if
it is installed with its Ray backend: `pip install "flwr[simulation]==1.41.0"`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

CLIENTS, IMAGES, COHORT, BATCH, LR = 100, 600, 10, 32, 0.01
DATA = "CPU_FLOWER_DATA"  # the environment variable with the folder of the files
APP = Path(__file__).parent / "flower_app"


def network() -> Any:
    """The paper's CNN for MNIST in plain torch."""
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(1, 10, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(10, 20, 5),
        nn.Dropout2d(0.5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(320, 50),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(50, 10),
    )


def write_data(folder: Path) -> None:
    """Writes the images and labels of all clients, in order of clients, to two files."""
    import numpy as np

    rng = np.random.default_rng(0)
    np.save(folder / "x.npy", rng.standard_normal((CLIENTS * IMAGES, 1, 28, 28), dtype=np.float32))
    np.save(folder / "y.npy", rng.integers(0, 10, CLIENTS * IMAGES))


def stored() -> tuple[Any, Any]:
    """The images and labels of the files, memory-mapped."""
    import numpy as np

    x, y = (np.load(Path(os.environ[DATA]) / name, mmap_mode="r") for name in ("x.npy", "y.npy"))
    return x, y


@lru_cache(maxsize=CLIENTS)
def client_data(client: int) -> Any:
    """The images and labels of a client, cached."""
    import torch

    rows = slice(client * IMAGES, (client + 1) * IMAGES)
    x, y = (torch.tensor(values[rows]) for values in stored())
    return x, y


def train(model: Any, client: int) -> float:
    """Trains a client for one local epoch; returns the last loss."""
    import torch

    x, y = client_data(client)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    model.train()
    for rows in torch.randperm(len(x)).split(BATCH):
        loss = torch.nn.functional.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def plain(rounds: int) -> list[float]:
    """The times at which rounds of a plain loop over clients ended, after its start."""
    import torch

    model = network()
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ends = [time.time()]
    for _ in range(rounds):
        total = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
        for client in torch.randperm(CLIENTS)[:COHORT].tolist():
            model.load_state_dict(start)
            train(model, client)
            for name, tensor in model.state_dict().items():
                total[name] += tensor / COHORT
        start = total
        ends.append(time.time())
    return ends


def ours(engine: str, rounds: int) -> list[float]:
    """The times at which rounds of an engine ended, after its start; with one mode it is FedAvg."""
    import fedensemble as fe

    data = fe.FederatedData.from_arrays(*stored(), [IMAGES] * CLIENTS)
    federation = fe.Federation(
        network,
        data,
        fe.FedAvg(lr=LR),
        modes=1,
        clients_per_round=COHORT,
        batch_size=BATCH,
        engine=engine,
    )
    return [time.time(), *(time.time() for _ in federation.rounds(rounds))]


def flower(rounds: int) -> list[float]:
    """The times at which rounds of Flower's simulation ended; one core per client that trains."""
    from flower_app import client_app, serve
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp
    from flwr.simulation import run_simulation

    server_app = ServerApp()
    with tempfile.TemporaryDirectory() as folder:
        ends = Path(folder) / "ends.json"

        @server_app.main()
        def _main(grid: Grid, context: Context) -> None:
            # run_simulation has no argument for the settings of a run
            context.run_config = {"rounds": rounds, "ends": str(ends)}
            serve(grid, context)

        resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
        run_simulation(server_app, client_app, num_supernodes=CLIENTS, backend_config=resources)
        return list(json.loads(ends.read_text()))


def flwr_run(rounds: int) -> list[float]:
    """The times at which rounds ended under `flwr run`; ends the SuperLink that it starts."""
    with tempfile.TemporaryDirectory() as home:
        ends = Path(home) / "ends.json"
        programs = str(Path(sys.executable).parent)
        settings = {
            **os.environ,
            "FLWR_HOME": home,
            "PATH": os.pathsep.join([programs, os.environ.get("PATH", "")]),
        }
        command = ["flwr", "run", str(APP), "--stream", "-c", f"rounds={rounds} ends='{ends}'"]
        command += ["--federation-config", f"num-supernodes={CLIENTS} client-resources-num-cpus=1"]
        try:
            process = subprocess.run(
                command, capture_output=True, text=True, env=settings, check=False
            )
            if not ends.exists():
                sys.exit(f"flwr run failed:\n{process.stdout[-3000:]}\n{process.stderr[-3000:]}")
            return list(json.loads(ends.read_text()))
        finally:
            # The SuperLink goes on in the background. Its environment has the temporary FLWR_HOME.
            for environ in Path("/proc").glob("[0-9]*/environ"):
                with suppress(OSError):
                    if (
                        f"FLWR_HOME={home}".encode() in environ.read_bytes()
                        and int(environ.parent.name) != os.getpid()
                    ):
                        os.kill(int(environ.parent.name), signal.SIGTERM)


WAYS = {
    "plain": ("plain torch loop", plain),
    "loop": ("fedensemble, engine loop", lambda rounds: ours("loop", rounds)),
    "vector": ("fedensemble, engine vector", lambda rounds: ours("vector", rounds)),
    "flower": ("Flower's simulation, from Python", flower),
    "flwr-run": ("Flower's simulation, `flwr run`", flwr_run),
}
OURS, PEERS = ("loop", "vector"), ("flower", "flwr-run")


def measure(way: str, rounds: int, threads: int, folder: str) -> tuple[float, float, float]:
    """Seconds of the fastest steady round, to the end of the first round, and of the process."""
    # Users do not set this variable: without cached bytecode every import would be slower.
    usual = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    settings = {
        **usual,
        DATA: folder,
        "OMP_NUM_THREADS": str(threads),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_DEDUP_LOGS": "0",
        "PYTHONWARNINGS": "ignore",
        "CUDA_VISIBLE_DEVICES": "",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(APP.parent), str(APP), os.environ.get("PYTHONPATH")])
        ),
    }
    command = [sys.executable, __file__, "--one", way, "--rounds", str(rounds)]
    started = time.time()
    done = subprocess.run(command, capture_output=True, text=True, env=settings, check=False)
    total = time.time() - started
    if done.returncode:
        sys.exit(f"{way} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    ends = json.loads(done.stdout.splitlines()[-1])
    return min(b - a for a, b in pairwise(ends[1:])), ends[1] - started, total


def main() -> None:
    """Measures all programs and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--repeats", type=int, default=1, help="measurements of each program; the median counts"
    )
    parser.add_argument(
        "--only", default=None, help=f"programs, separated by commas, of {', '.join(WAYS)}"
    )
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="also write the table as JSON")
    options = parser.parse_args()
    if options.one:
        if options.one in OURS:
            # Only for our engines: the import would add to the time of the other programs.
            from fedensemble.runtime.malloc import keep_freed_memory

            keep_freed_memory()
        print(json.dumps(WAYS[options.one][1](options.rounds)), flush=True)
        return
    from importlib.metadata import version
    from statistics import median

    from fedensemble.bench.timing import LiveTable, machine, say, write

    has_flower = find_spec("flwr") is not None and find_spec("ray") is not None
    wanted = (
        options.only.split(",")
        if options.only
        else [way for way in WAYS if way not in PEERS or has_flower]
    )
    peer = (
        f"flwr {version('flwr')}, ray {version('ray')}" if has_flower else "Flower is not installed"
    )
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder))
        turns = [
            {way: measure(way, options.rounds, options.threads, folder) for way in wanted}
            for _ in range(options.repeats)
        ]
    results = {
        way: [median(values) for values in zip(*(turn[way] for turn in turns), strict=True)]
        for way in wanted
    }
    peers = [way for way in PEERS if way in results]
    header = [
        "way",
        "steady, s a round",
        "first round done after, s",
        f"total of {options.rounds} rounds, s",
    ]
    header += (
        [f"Flower / it: {what}" for what in ("steady", "first round", "total")] if peers else []
    )
    title = f"FedAvg, CNN, 10 of 100 clients, on {options.threads} cores. {machine('cpu')}; {peer}"
    table = LiveTable(
        f"{title}; ratios to {' and '.join(WAYS[way][0] for way in peers)}" if peers else title,
        header,
        say,
    )
    for way, values in results.items():
        ratios = [
            ", ".join(f"{results[p][n] / value:.1f}" for p in peers)
            for n, value in enumerate(values)
            if peers
        ]
        table.add(WAYS[way][0], *(f"{value:.2f}" for value in values), *ratios)
    write(options.out, "cpu", [table])


if __name__ == "__main__":
    main()
