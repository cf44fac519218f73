"""Rounds of clients of unequal size on a GPU: in blocks by length, against one block for all.

    python benchmarks/unequal_clients.py [--device cuda] [--rounds 20]

Both ways train the same visits in the same process, in turn. "padding" is the number of local steps
of the longest client times the clients, over the local steps that the clients take.
"""

from __future__ import annotations

import argparse
import time

import torch

import fedensemble as fe
from fedensemble.data import load, partition

MODELS = {
    "cnn": ({"channels": 1, "side": 28}, {"name": "cnn"}, 32),
    "resnet20": ({}, {"name": "resnet20", "norm": "group"}, 50),
    "resnet18": ({}, {"name": "resnet18", "norm": "group"}, 16),
}


def measure(model: str, alpha: float, device: str, rounds: int) -> str:
    images, network, batch = MODELS[model]
    data = partition(
        load("stand-in-images", n=20_000, n_test=100, **images),
        "dirichlet",
        clients=100,
        alpha=alpha,
    )
    federations = []
    for divided in (True, False):
        federation = fe.Federation(
            network,
            data,
            fe.FedAvg(lr=0.01),
            modes=5,
            clients_per_round=20,
            batch_size=batch,
            device=device,
            engine="vector",
            engine_options={"divide": divided},
        )
        federations.append(federation)
    seconds = [0.0, 0.0]
    examples = steps = padded = 0
    for round in range(rounds + 3):
        for index, federation in enumerate(federations):
            synchronize(device)
            started = time.perf_counter()
            report = federation.run_round()
            synchronize(device)
            if round >= 3:  # the first rounds compile kernels and capture graphs
                seconds[index] += time.perf_counter() - started
        if round >= 3:
            counts = -(-data.size[report.plan.client] // batch)
            examples += int(data.size[report.plan.client].sum())
            steps, padded = steps + int(counts.sum()), padded + int(counts.max()) * len(counts)
    cells = [model, f"{alpha:g}", f"{padded / steps:.1f}", f"{federations[0].engine.step_overhead}"]
    cells += [f"{examples / each:,.0f}" for each in seconds]
    return f"| {' | '.join(cells)} | {seconds[1] / seconds[0]:.2f} |"


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--models", default=",".join(MODELS))
    arguments = parser.parse_args()
    print("| model | alpha | padding | overhead | by length, examples/s | one block | ratio |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for model in arguments.models.split(","):
        for alpha in (0.1, 0.3):
            print(measure(model, alpha, arguments.device, arguments.rounds), flush=True)


if __name__ == "__main__":
    main()
