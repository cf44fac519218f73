"""How much faster batched visits are than one client after another, in samples per second.

The engines are measured through `Federation.rounds`, so gathering, shuffling, aggregation and
reporting are included. Evaluation is not.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..algorithms import FedAvg
from ..data import FederatedData
from ..errors import InputError, unknown
from ..federation.federation import Federation
from ..models import models
from .timing import LiveTable, Say, fastest, machine, say, synchronize, write


class Case(NamedTuple):
    """A model and the workload of one round."""

    model: str
    clients: int
    examples: int  # per client
    batch: int
    input: str
    norm: str = ""  # empty: the model's default
    population: int = 0  # clients to sample from, if more than `clients`


CASES = {
    **{f"cnn-{clients}": Case("cnn", clients, 600, 32, "mnist") for clients in (10, 100, 1000)},
    "cnn-10-of-100": Case("cnn", 10, 600, 32, "mnist", population=100),
    **{
        f"resnet18-{clients}-{batch}": Case("resnet18", clients, 10 * batch, batch, "cifar")
        for batch in (16, 50)
        for clients in (10, 30, 60)
    },
    "resnet20-60-16": Case("resnet20", 60, 160, 16, "cifar"),
    "resnet20-group-60-16": Case("resnet20", 60, 160, 16, "cifar", "group"),
    "lstm-50": Case("lstm", 50, 320, 32, "text"),
    "pfl": Case("cnn-pfl", 50, 50, 10, "cifar"),
    "mlp-10": Case("mlp", 10, 100, 10, "digits"),
}
QUICK = {
    "cpu": ("cnn-10-of-100", "mlp-10"),
    "cuda": ("cnn-100", "resnet18-10-16", "lstm-50", "pfl"),
}
INPUTS = {"mnist": (1, 28, 28), "cifar": (3, 32, 32), "text": (80,), "digits": (64,)}
METHODS = ("plain", "loop", "vector")
PLAIN = "plain torch loop"
_LOOPED = 10  # clients that loops train: their speed does not depend on the number of clients


def federation(
    case: Case, engine: str, device: str, options: dict[str, Any], clients: int | None = None
) -> Federation:
    """A federation on synthetic data of the case's shape with `clients` clients per round."""
    clients = clients or case.clients
    data = _data(case.input, case.examples, max(clients, case.population))
    kwargs: dict[str, Any] = {"outputs": data.classes} | ({"norm": case.norm} if case.norm else {})
    kwargs |= {} if case.input == "text" else {"shape": INPUTS[case.input]}
    return Federation(
        lambda: models[case.model](**kwargs),
        data,
        FedAvg(lr=0.01),
        modes=5,
        clients_per_round=clients,
        batch_size=case.batch,
        engine=engine,
        device=device,
        engine_options=options,
    )


@lru_cache(maxsize=1)  # all methods of a case share one data set
def _data(kind: str, examples: int, clients: int) -> FederatedData:
    """Clients of equal size with random inputs, or random tokens."""
    shape, count, text = INPUTS[kind], clients * examples, kind == "text"
    generator, classes = torch.Generator().manual_seed(0), 90 if text else 10
    if text:
        x = torch.randint(0, classes, (count, *shape), generator=generator)
    else:
        x = torch.randn(count, *shape, generator=generator)
    y = torch.randint(0, classes, (count, *shape) if text else (count,), generator=generator)
    return FederatedData.from_arrays(x, y, [examples] * clients, classes=classes)


def plain_loop(case: Case, device: str) -> Callable[[], None]:
    """A function that trains the next client with a plain nn.Module and torch.optim.SGD."""
    reference = federation(case, "loop", device, {}, min(case.clients, _LOOPED))
    data = reference.data.to(device)
    model = reference.model.build(0).to(device).train()
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sums = {
        name: torch.zeros_like(tensor)
        for name, tensor in start.items()
        if tensor.is_floating_point()
    }
    visits = 0

    def train_client() -> None:
        nonlocal visits
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        x, y = data.client(visits % len(data))
        visits += 1
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        for rows in torch.split(torch.randperm(len(x), device=device), case.batch):
            loss = torch.nn.functional.cross_entropy(model(x[rows]).movedim(-1, 1), y[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        torch.set_float32_matmul_precision(precision)
        for name, tensor in model.state_dict().items():
            if name in sums:
                sums[name] += tensor

    return train_client


class _Method(NamedTuple):
    """A way to train that is built and has run once."""

    name: str
    call: Callable[[], Any]
    examples: int  # per call
    start: float  # seconds to build it and finish the first call


def _prepare(case: Case, device: str, engine: str, precision: str) -> _Method:
    """A plain loop or an engine, built and called once."""
    started = time.perf_counter()
    clients = case.clients if engine == "vector" else min(case.clients, _LOOPED)
    if engine == "plain":
        name, call, examples = PLAIN, plain_loop(case, device), case.examples
    else:
        options: dict[str, Any] = {"precision": precision} if precision else {}
        trained = federation(case, engine, device, options, clients)
        name = f"engine {engine}" + (f", {precision}" if precision not in ("", "auto") else "")
        call, examples = (lambda: _run_round(trained)), clients * case.examples
    call()
    synchronize(device)
    return _Method(name, call, examples, time.perf_counter() - started)


def _run_round(trained: Federation) -> None:
    for _ in trained.rounds(1):
        pass


def run(
    cases: Sequence[str] = (),
    device: str = "cpu",
    seconds: float = 3.0,
    precisions: Sequence[str] = (),
    ways: Sequence[str] = METHODS,
    out: Path | None = None,
    say: Say = say,
) -> LiveTable:
    """Measures the cases named, or the quick ones, and prints the table."""
    for name in cases:
        if name not in CASES:
            raise InputError(unknown("case", name, CASES))
    cuda = device.startswith("cuda")
    precisions = precisions or (("tf32", "bf16") if cuda else ("auto",))
    header = ("case", "way", "samples/s", "ratio to a plain torch loop", "start, s")
    table = LiveTable(f"Batched visits against a loop over clients. {machine(device)}", header, say)
    for name in cases or QUICK["cuda" if cuda else "cpu"]:
        case = CASES[name]
        base: float | None = None
        methods = [
            (way, precision)
            for way in ways
            for precision in (precisions if way == "vector" else [""])
        ]
        # On a CPU the methods take turns, so that all meet the same load. On a GPU they run one
        # after another, because together they might not fit into its memory.
        for group in [[method] for method in methods] if cuda else [methods]:
            prepared = [_prepare(case, device, *method) for method in group]
            best = fastest({method.name: method.call for method in prepared}, device, seconds)
            for measured in prepared:
                speed = measured.examples / best[measured.name]
                base = speed if measured.name == PLAIN else base
                ratio = f"{speed / base:.1f}" if base else ""
                table.add(name, measured.name, f"{speed:,.0f}", ratio, f"{measured.start:.1f}")
            del prepared, measured  # empty_cache frees only what nothing refers to
            if cuda:
                torch.cuda.empty_cache()
    write(out, device, [table])
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; or 'all'")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=3.0, help="per method and case")
    parser.add_argument(
        "--precision", action="append", help="float32, tf32 or bf16; may be repeated"
    )
    parser.add_argument(
        "--way",
        action="append",
        choices=METHODS,
        help="a plain torch loop, or an engine; may be repeated",
    )
    parser.add_argument("--out", type=Path, help="also write the table as JSON")
    options = parser.parse_args(arguments)
    cases = list(CASES) if options.cases == ["all"] else options.cases
    run(
        cases,
        options.device,
        options.seconds,
        options.precision or (),
        options.way or METHODS,
        options.out,
    )
