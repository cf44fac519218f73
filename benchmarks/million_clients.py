"""Seconds per round and peak memory of a simulation with very many clients, as one table.

    python benchmarks/million_clients.py [--clients 1000 1000000] [--per-round 1000] [--rounds 5]

A small model on synthetic data with a few examples per client. All clients are in one process, with
and without device speeds, drop-outs and hours of the day. Each row is measured in its own process,
because the peak memory of a process never falls.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import fedensemble as fe

FEATURES, CLASSES = 8, 4
SETUPS = {  # name: schedule, algorithm, participation
    "stratified": ("stratified", fe.FedAvg(lr=0.05), fe.Everybody()),
    "balanced": ("balanced", fe.FedAvg(lr=0.05), fe.Everybody()),
    "independent": ("independent", fe.FedAvg(lr=0.05), fe.Everybody()),
    "client memory": ("stratified", fe.Scaffold(lr=0.05), fe.Everybody()),
    "devices": ("stratified", fe.FedAvg(lr=0.05), "devices"),
}


def measure(way: str, clients: int, per_round: int, rounds: int) -> dict[str, float]:
    """Times of set-up, round and checkpoint, sizes, and the peak memory of this process."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(4, 13, (clients,), generator=generator)
    x = torch.randn(int(sizes.sum()), FEATURES, generator=generator)
    y = torch.randint(0, CLASSES, (len(x),), generator=generator)
    schedule, algorithm, participation = SETUPS[way]
    if participation == "devices":
        ask = min(clients, per_round * 13 // 10)
        participation = fe.Devices(ask=ask, drop=0.05, least_hours=6, most_hours=12)
    started = time.perf_counter()
    federation = fe.Federation(
        lambda: nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, CLASSES)),
        fe.FederatedData.from_arrays(x, y, sizes),
        algorithm,
        modes=5,
        strata=min(100, per_round),
        clients_per_round=per_round,
        batch_size=4,
        schedule=schedule,
        participation=participation,
    )
    list(federation.rounds(1))  # warm-up: libraries initialize themselves
    ready = time.perf_counter()
    list(federation.rounds(rounds))
    done = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        saved = federation.save(Path(folder))
        size = saved.stat().st_size
    return {
        "setup": ready - started,
        "round": (done - ready) / rounds,
        "checkpoint": time.perf_counter() - done,
        "checkpoint_mb": size / 1e6,
        "data_mb": (x.numel() * x.element_size() + y.numel() * y.element_size()) / 1e6,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


def main() -> None:
    """Measures each set-up in its own process and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[1000, 1_000_000])
    parser.add_argument("--per-round", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="+", default=list(SETUPS), choices=list(SETUPS))
    # set-up and clients: prints one row of the table as JSON
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(
            json.dumps(
                measure(options.one[0], int(options.one[1]), options.per_round, options.rounds)
            )
        )
        return
    threads = torch.get_num_threads()
    print(f"{options.per_round} clients per round, {options.rounds} rounds, {threads} threads\n")
    print(
        "| what | clients | data, MB | set-up, s | per round, s | checkpoint, s | checkpoint, MB | "
        "peak memory, MB |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for way in options.ways:
        for clients in options.clients:
            command = [
                sys.executable,
                __file__,
                "--one",
                way,
                str(clients),
                "--per-round",
                str(options.per_round),
            ]
            command += ["--rounds", str(options.rounds)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            row = json.loads(done.stdout.splitlines()[-1])
            print(
                f"| {way} | {clients:,} | {row['data_mb']:.0f} | {row['setup']:.1f} | "
                f"{row['round']:.2f} | {row['checkpoint']:.2f} | {row['checkpoint_mb']:.1f} | "
                f"{row['peak_mb']:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
