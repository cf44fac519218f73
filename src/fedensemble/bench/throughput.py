"""How much faster are batched visits than one client after another? Samples a second, and ratios.

Everything goes through `Federation.rounds`: gathering, shuffling, aggregation and reporting
included, evaluation not.
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
from .timing import LiveTable, Say, fastest, machine, say, wait, write


class Case(NamedTuple):
    """A model and a round's work."""

    model: str
    clients: int
    examples: int  # a client
    batch: int
    input: str
    norm: str = ""  # the model's own if empty
    population: int = 0  # clients of which these are drawn, if there are more


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
WAYS = ("plain", "loop", "vector")
PLAIN = "plain torch loop"
_LOOPED = 10  # clients; the speed of a loop does not depend on how many there are


def federation(
    case: Case, engine: str, device: str, options: dict[str, Any], clients: int | None = None
) -> Federation:
    """A federation of synthetic data of the case's shape, so many of whose clients train in every
    round.
    """
    clients = clients or case.clients
    data = _data(case.input, case.examples, max(clients, case.population))
    given: dict[str, Any] = {"outputs": data.classes} | ({"norm": case.norm} if case.norm else {})
    given |= {} if case.input == "text" else {"shape": INPUTS[case.input]}
    return Federation(
        lambda: models[case.model](**given),
        data,
        FedAvg(lr=0.01),
        modes=5,
        clients_per_round=clients,
        batch_size=case.batch,
        engine=engine,
        device=device,
        engine_options=options,
    )


@lru_cache(maxsize=1)  # the ways of a case have the same
def _data(kind: str, examples: int, clients: int) -> FederatedData:
    """Clients of one size with numbers, or tokens, by chance."""
    shape, count, text = INPUTS[kind], clients * examples, kind == "text"
    generator, classes = torch.Generator().manual_seed(0), 90 if text else 10
    if text:
        x = torch.randint(0, classes, (count, *shape), generator=generator)
    else:
        x = torch.randn(count, *shape, generator=generator)
    y = torch.randint(0, classes, (count, *shape) if text else (count,), generator=generator)
    return FederatedData.from_arrays(x, y, [examples] * clients, classes=classes)


def plain_loop(case: Case, device: str) -> Callable[[], None]:
    """The usual way: one nn.Module, torch.optim.SGD, one client; each call trains the next and adds
    it to the sum.
    """
    made = federation(case, "loop", device, {}, min(case.clients, _LOOPED))
    data = made.data.to(device)
    model = made.learner.build(0).to(device).train()
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sums = {
        name: torch.zeros_like(tensor)
        for name, tensor in start.items()
        if tensor.is_floating_point()
    }
    done = 0

    def call() -> None:
        nonlocal done
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        x, y = data.client(done % len(data))
        done += 1
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        for rows in torch.split(torch.randperm(len(x), device=device), case.batch):
            loss = torch.nn.functional.cross_entropy(model(x[rows]).movedim(-1, 1), y[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        torch.set_float32_matmul_precision(before)
        for name, tensor in model.state_dict().items():
            if name in sums:
                sums[name] += tensor

    return call


class _Way(NamedTuple):
    """Something to call, ready and warm."""

    name: str
    call: Callable[[], Any]
    examples: int  # a call
    start: float  # seconds until the first call was done


def _prepare(case: Case, device: str, engine: str, precision: str) -> _Way:
    started = time.perf_counter()
    clients = case.clients if engine == "vector" else min(case.clients, _LOOPED)
    if engine == "plain":
        name, call, examples = PLAIN, plain_loop(case, device), case.examples
    else:
        options: dict[str, Any] = {"precision": precision} if precision else {}
        made = federation(case, engine, device, options, clients)
        name = f"engine {engine}" + (f", {precision}" if precision not in ("", "auto") else "")
        call, examples = (lambda: _round(made)), clients * case.examples
    call()
    wait(device)
    return _Way(name, call, examples, time.perf_counter() - started)


def _round(made: Federation) -> None:
    for _ in made.rounds(1):
        pass


def run(
    cases: Sequence[str] = (),
    device: str = "cpu",
    seconds: float = 3.0,
    precisions: Sequence[str] = (),
    ways: Sequence[str] = WAYS,
    out: Path | None = None,
    say: Say = say,
) -> LiveTable:
    """Measures cases by name and prints the table."""
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
        chosen = [
            (way, precision)
            for way in ways
            for precision in (precisions if way == "vector" else [""])
        ]
        # Ways take turns, so that all meet the same load; but a card is given to one at a time.
        for together in [[way] for way in chosen] if cuda else [chosen]:
            prepared = [_prepare(case, device, *way) for way in together]
            best = fastest({each.name: each.call for each in prepared}, device, seconds)
            for each in prepared:
                speed = each.examples / best[each.name]
                base = speed if each.name == PLAIN else base
                ratio = f"{speed / base:.1f}" if base else ""
                table.add(name, each.name, f"{speed:,.0f}", ratio, f"{each.start:.1f}")
            del prepared, each
            if cuda:
                torch.cuda.empty_cache()
    write(out, device, [table])
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """The benchmark's own command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; or 'all'")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=3.0, help="to spend on each way of a case")
    parser.add_argument(
        "--precision", action="append", help="float32, tf32 or bf16; may be repeated"
    )
    parser.add_argument(
        "--way",
        action="append",
        choices=WAYS,
        help="a plain torch loop, or an engine; may be repeated",
    )
    parser.add_argument("--out", type=Path, help="write the table as JSON, too")
    chosen = parser.parse_args(arguments)
    cases = list(CASES) if chosen.cases == ["all"] else chosen.cases
    run(
        cases, chosen.device, chosen.seconds, chosen.precision or (), chosen.way or WAYS, chosen.out
    )
