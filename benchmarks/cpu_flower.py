"""FedAvg on a CPU: our engines, a plain torch loop and Flower's simulation; prints one table.

    python benchmarks/cpu_flower.py [--rounds 5] [--threads 2] [--repeats 3] [--only vector,flower]

100 clients with 600 MNIST-shaped images each, the paper's CNN, 10 clients a round, batch 32, one
epoch. Each way runs in a process of its own and reads the images from files: "total" is that
process from its start to its end, imports and all; "steady" the fastest round but the first. With
repeats, ways take turns, and the table has each one's median. Flower is measured where it is
installed with its Ray backend: `pip install "flwr[simulation]==1.41.0"`.
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
DATA = "CPU_FLOWER_DATA"  # the variable with the folder of the files
APP = Path(__file__).parent / "flower_app"


def network() -> Any:
    """The paper's CNN for MNIST, without anything of ours."""
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
    """All clients' images and labels, client after client, as two files."""
    import numpy as np

    numbers = np.random.default_rng(0)
    np.save(
        folder / "x.npy", numbers.standard_normal((CLIENTS * IMAGES, 1, 28, 28), dtype=np.float32)
    )
    np.save(folder / "y.npy", numbers.integers(0, 10, CLIENTS * IMAGES))


def stored() -> tuple[Any, Any]:
    """The files' images and labels, of which only what is used is read."""
    import numpy as np

    x, y = (np.load(Path(os.environ[DATA]) / name, mmap_mode="r") for name in ("x.npy", "y.npy"))
    return x, y


@lru_cache(maxsize=CLIENTS)
def client_data(client: int) -> Any:
    """A client's images and labels; kept, once read."""
    import torch

    rows = slice(client * IMAGES, (client + 1) * IMAGES)
    x, y = (torch.tensor(values[rows]) for values in stored())
    return x, y


def train(model: Any, client: int) -> float:
    """One local epoch; gives the last loss."""
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
    """A loop over clients as one would write it."""
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
    """One mode, so that the work is FedAvg's."""
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
    """Flower's simulation from Python; a core for each client that trains."""
    from flower_app import client_app, serve
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp
    from flwr.simulation import run_simulation

    server_app = ServerApp()
    with tempfile.TemporaryDirectory() as folder:
        ends = Path(folder) / "ends.json"

        @server_app.main()
        def _main(grid: Grid, context: Context) -> None:
            # from Python there is no other way to give them
            context.run_config = {"rounds": rounds, "ends": str(ends)}
            serve(grid, context)

        resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
        run_simulation(server_app, client_app, num_supernodes=CLIENTS, backend_config=resources)
        return list(json.loads(ends.read_text()))


def flwr_run(rounds: int) -> list[float]:
    """Flower's simulation as its users start it, by `flwr run`; the SuperLink that it starts is
    ended afterwards.
    """
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
            done = subprocess.run(
                command, capture_output=True, text=True, env=settings, check=False
            )
            if not ends.exists():
                sys.exit(f"flwr run failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
            return list(json.loads(ends.read_text()))
        finally:
            for process in Path("/proc").glob("[0-9]*/environ"):
                with suppress(OSError):
                    if (
                        f"FLWR_HOME={home}".encode() in process.read_bytes()
                        and int(process.parent.name) != os.getpid()
                    ):
                        os.kill(int(process.parent.name), signal.SIGTERM)


WAYS = {
    "plain": ("plain torch loop", plain),
    "loop": ("fedensemble, engine loop", lambda rounds: ours("loop", rounds)),
    "vector": ("fedensemble, engine vector", lambda rounds: ours("vector", rounds)),
    "flower": ("Flower's simulation, from Python", flower),
    "flwr-run": ("Flower's simulation, `flwr run`", flwr_run),
}
PEERS = ("flower", "flwr-run")


def measured(way: str, rounds: int, threads: int, folder: str) -> tuple[float, float, float]:
    """Seconds of the fastest round but the first, before the first round ends, and of the whole
    process.
    """
    # of no user's
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
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--repeats", type=int, default=1, help="of each way, of which the median counts"
    )
    parser.add_argument(
        "--only", default=None, help=f"ways, separated by commas, of {', '.join(WAYS)}"
    )
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="write the table as JSON, too")
    chosen = parser.parse_args()
    if chosen.one:
        print(json.dumps(WAYS[chosen.one][1](chosen.rounds)), flush=True)
        return
    from importlib.metadata import version
    from statistics import median

    from fedensemble.bench.timing import LiveTable, machine, say, write

    known = find_spec("flwr") is not None and find_spec("ray") is not None
    wanted = (
        chosen.only.split(",")
        if chosen.only
        else [way for way in WAYS if way not in PEERS or known]
    )
    peer = f"flwr {version('flwr')}, ray {version('ray')}" if known else "Flower is not installed"
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder))
        turns = [
            {way: measured(way, chosen.rounds, chosen.threads, folder) for way in wanted}
            for _ in range(chosen.repeats)
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
        f"total of {chosen.rounds} rounds, s",
    ]
    header += (
        [f"Flower / it: {what}" for what in ("steady", "first round", "total")] if peers else []
    )
    title = f"FedAvg, CNN, 10 of 100 clients, on {chosen.threads} cores. {machine('cpu')}; {peer}"
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
    write(chosen.out, "cpu", [table])


if __name__ == "__main__":
    main()
