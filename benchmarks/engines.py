"""How much faster are batched visits than one client after another? Prints one table of samples a second and ratios.

    python benchmarks/engines.py [cnn-100 resnet18-10-16 ...] [--seconds 3] [--precision bf16]

Everything goes through `Federation.rounds`: gathering, shuffling, aggregation and reporting included, evaluation not.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

import torch

import fedensemble as fe
from fedensemble.models import models

CASES = {  # name: (model, its options, clients a round, examples a client, batch, input)
    "cnn-10": ("cnn", {}, 10, 600, 32, "mnist"),
    "cnn-100": ("cnn", {}, 100, 600, 32, "mnist"),
    "cnn-1000": ("cnn", {}, 1000, 600, 32, "mnist"),
    "resnet18-10-16": ("resnet18", {}, 10, 160, 16, "cifar"),
    "resnet18-30-16": ("resnet18", {}, 30, 160, 16, "cifar"),
    "resnet18-60-16": ("resnet18", {}, 60, 160, 16, "cifar"),
    "resnet18-10-50": ("resnet18", {}, 10, 500, 50, "cifar"),
    "lstm-50": ("lstm", {}, 50, 320, 32, "text"),
    "pfl": ("cnn-pfl", {}, 50, 50, 10, "cifar"),
}
INPUTS = {"mnist": (1, 28, 28), "cifar": (3, 32, 32), "text": (80,)}


def make(case: str, engine: str, device: str, options: dict[str, object]) -> tuple[fe.Federation, int]:
    """A federation of synthetic data of the case's shape, and its examples a round."""
    name, model_options, clients, examples, batch, kind = CASES[case]
    shape = INPUTS[kind]
    count = clients * examples
    generator = torch.Generator().manual_seed(0)
    if kind == "text":
        x, outputs = torch.randint(0, 90, (count, *shape), generator=generator), 90
        y = torch.randint(0, 90, (count, *shape), generator=generator)
    else:
        x, outputs = torch.randn(count, *shape, generator=generator), 10
        y = torch.randint(0, 10, (count,), generator=generator)
    data = fe.FederatedData.from_arrays(x, y, [examples] * clients, classes=outputs)
    given = {"shape": shape, "outputs": outputs} if kind != "text" else {"outputs": outputs}
    federation = fe.Federation(
        lambda: models[name](**given, **model_options), data, fe.FedAvg(lr=0.01), modes=5, clients_per_round=clients,
        batch_size=batch, engine=engine, device=device, engine_options=options,
    )  # fmt: skip
    return federation, count


def speed(federation: fe.Federation, examples: int, seconds: float, device: str) -> float:
    """Samples a second over at least `seconds`, after one round to warm up."""
    list(federation.rounds(1))
    rounds = 0
    wait(device)
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        list(federation.rounds(1))
        rounds += 1
        wait(device)
    return rounds * examples / (time.perf_counter() - started)


def plain_speed(case: str, seconds: float, device: str) -> float:
    """Samples a second of the usual way: one nn.Module, torch.optim.SGD, one client after another, then the average."""
    federation, _ = make(case, "loop", device, {})
    data, batch = federation.data.to(device), federation.work.batch_size
    model = federation.learner.build(0).to(device).train()
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.set_float32_matmul_precision("high")
    done, clients = 0, len(data)
    sums = {name: torch.zeros_like(tensor) for name, tensor in start.items() if tensor.is_floating_point()}
    started = time.perf_counter()
    while done == 0 or time.perf_counter() - started < seconds:
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        x, y = data.client(done % clients)
        order = torch.randperm(len(x), device=device)
        for rows in order.split(batch):
            outputs = model(x[rows])
            loss = torch.nn.functional.cross_entropy(outputs.movedim(-1, 1), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for name, tensor in model.state_dict().items():
            if name in sums:
                sums[name] += tensor
        wait(device)
        if done == 0:  # the first client warms up
            started = time.perf_counter()
        done += 1
    torch.set_float32_matmul_precision("highest")
    return (done - 1) * len(x) / (time.perf_counter() - started)


def wait(device: str) -> None:
    """Until the card is done."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=None)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--precision", default=None, help="float32, tf32 or bf16; on a GPU all of tf32 and bf16")
    parser.add_argument("--no-loop", action="store_true")
    parser.add_argument("--out", type=Path, default=None, help="write the numbers as JSON")
    chosen = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    machine = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else f"{platform.processor()}, {torch.get_num_threads()} threads"
    )
    print(f"machine: {machine}; torch {torch.__version__}; fedensemble {fe.__version__}")
    default = ["cnn-100", "resnet18-10-16", "resnet18-60-16", "lstm-50", "pfl"] if device == "cuda" else ["cnn-10"]
    precisions = [chosen.precision] if chosen.precision else ["tf32", "bf16"] if device == "cuda" else ["auto"]
    results = []
    print("| case | way | samples/s | ratio to plain loop |\n| --- | --- | ---: | ---: |")
    for case in chosen.cases or default:
        base = None
        if not chosen.no_loop:
            base = plain_speed(case, chosen.seconds, device)
            print(f"| {case} | plain torch loop over clients | {base:,.0f} | 1 |", flush=True)
            results.append({"case": case, "way": "plain", "speed": base})
        for precision in precisions:
            started = time.perf_counter()
            federation, examples = make(case, "vector", device, {"precision": precision})
            list(federation.rounds(1))
            wait(device)
            first = time.perf_counter() - started
            got = speed(federation, examples, chosen.seconds, device)
            ratio = f"{got / base:.1f}" if base else ""
            notes = "; ".join(federation.engine.notes)
            way = f"vector, {precision}, {first:.0f} s to start, blocks of {federation.engine.block} {notes}"
            print(f"| {case} | {way} | {got:,.0f} | {ratio} |", flush=True)
            results.append({"case": case, "way": precision, "speed": got, "start": first})
            del federation
            if device == "cuda":
                torch.cuda.empty_cache()
    if chosen.out:
        chosen.out.write_text(
            json.dumps({"machine": machine, "torch": torch.__version__, "results": results}, indent=1)
        )


if __name__ == "__main__":
    main()
