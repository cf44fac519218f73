"""How fast networks train that nobody tuned the engine for, with a plain torch loop beside them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..algorithms import FedAvg
from ..data import FederatedData
from ..errors import InputError, unknown
from ..federation.federation import Federation
from ..modeling.losses import cross_entropy, mse
from . import networks
from .timing import LiveTable, Say, fastest, machine, say, synchronize, write


class Case(NamedTuple):
    """A network, its data and its loss."""

    build: Callable[[], nn.Module]
    data: str  # of `_DATA`
    loss: str = "cross_entropy"


CASES = {
    "vit": Case(networks.vit, "images"),
    "gpt": Case(networks.gpt, "text"),
    "encoder": Case(networks.Encoder, "text"),
    "convnext": Case(networks.convnext, "images"),
    "efficientnet": Case(networks.efficientnet, "images"),
    "mobilenet": Case(networks.mobilenet, "images"),
    "unet": Case(networks.UNet, "pixels"),
    "autoencoder": Case(networks.autoencoder, "pictures", "mse"),
    "gru": Case(networks.gru, "text"),
    "rnn": Case(networks.rnn, "text"),
    "tcn": Case(networks.TCN, "text"),
    "vgg": Case(networks.vgg, "images"),
    "tabular": Case(networks.tabular, "table"),
}
# The shape of an input and of its target, per kind of data.
_IMAGE, _TEXT = (3, 32, 32), (64,)
_DATA: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "images": (_IMAGE, ()),
    "pixels": (_IMAGE, _IMAGE[1:]),
    "pictures": (_IMAGE, _IMAGE),
    "text": (_TEXT, _TEXT),
    "table": ((networks.COLUMNS,), ()),
}
QUICK = ("tabular", "autoencoder")  # on a CPU
PLAIN = "plain torch loop"
_LOOPED = 10  # clients that the plain loop trains: its speed does not depend on their number
_BATCHES = 5  # per client and round
_SLOWEST = 12  # operations that a profile lists


class Size(NamedTuple):
    """The workload of one round."""

    clients: int = 50
    batch: int = 16


@lru_cache(maxsize=1)
def _data(kind: str, size: Size) -> FederatedData:
    """Clients of equal size with random inputs and targets."""
    generator = torch.Generator().manual_seed(0)
    shape, target = _DATA[kind]
    examples = _BATCHES * size.batch
    count, text = size.clients * examples, kind == "text"
    classes = networks.TOKENS if text else networks.CLASSES
    if text:
        x = torch.randint(0, classes, (count, *shape), generator=generator)
    else:
        x = torch.randn(count, *shape, generator=generator)
    if kind == "pictures":
        return FederatedData.from_arrays(x, x.clone(), [examples] * size.clients)
    y = torch.randint(0, classes, (count, *target), generator=generator)
    return FederatedData.from_arrays(x, y, [examples] * size.clients, classes=classes)


def federation(case: Case, size: Size, device: str, precision: str = "auto") -> Federation:
    """A federation whose rounds train all clients once."""
    return Federation(
        case.build,
        _data(case.data, size),
        FedAvg(lr=0.01),
        modes=1,
        clients_per_round=size.clients,
        batch_size=size.batch,
        loss=case.loss,
        engine="vector",
        device=device,
        engine_options={"precision": precision},
    )


def plain_loop(case: Case, size: Size, device: str) -> Callable[[], None]:
    """A function that trains some clients, one after another, with torch.optim.SGD."""
    data = _data(case.data, size).to(device)
    model = case.build().to(device).train()
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loss_function: Callable[[Tensor, Tensor], Tensor] = {
        "cross_entropy": cross_entropy,
        "mse": mse,
    }[case.loss]

    def train() -> None:
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        for client in range(min(size.clients, _LOOPED)):
            model.load_state_dict(start)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            x, y = data.client(client)
            for rows in torch.split(torch.randperm(len(x), device=device), size.batch):
                loss = loss_function(model(x[rows]), y[rows]).mean()
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        torch.set_float32_matmul_precision(precision)

    return train


def _run_round(trained: Federation) -> None:
    for _ in trained.rounds(1):
        pass


def _profile(trained: Federation, say: Say) -> None:
    """Prints the operations of one round that took longest on the GPU."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        _run_round(trained)
        torch.cuda.synchronize()
    rows: list[tuple[float, int, str]] = [
        (event.self_device_time_total / 1000, event.count, event.key)
        for event in profiler.key_averages()
        if str(event.device_type).endswith("CUDA")
    ]
    total = sum(row[0] for row in rows)
    say(f"\nGPU time of one round: {total:.2f} ms")
    for spent, count, name in sorted(rows, reverse=True)[:_SLOWEST]:
        say(f"  {spent:8.2f} ms {100 * spent / max(total, 1e-9):5.1f} %  {count:6d} x {name[:100]}")


def run(
    names: Sequence[str] = (),
    device: str = "cpu",
    seconds: float = 2.0,
    size: Size = Size(),  # noqa: B008 (immutable)
    precisions: Sequence[str] = (),
    out: Path | None = None,
    say: Say = say,
    profiled: bool = False,
) -> LiveTable:
    """Measures the networks named, or some of them, and prints a table.

    Args:
        seconds: time to spend on each measurement.
        profiled: also print where a round spends its time on the GPU.
    """
    for name in names:
        if name not in CASES:
            raise InputError(unknown("network", name, CASES))
    cuda = device.startswith("cuda")
    names = names or (tuple(CASES) if cuda else QUICK)
    precisions = precisions or (("tf32", "bf16") if cuda else ("auto",))
    title = (
        f"Networks as they come, {size.clients} clients, batch {size.batch}, against a plain torch "
        f"loop over clients. {machine(device)}"
    )
    header = ("network", "parameters", "way", "samples/s", "ratio", "start, s", "notes")
    table = LiveTable(title, header, say)
    for name in names:
        _measure(name, device, seconds, size, precisions, table, profiled)
    write(out, device, [table])
    return table


def _measure(
    name: str,
    device: str,
    seconds: float,
    size: Size,
    precisions: Sequence[str],
    table: LiveTable,
    profiled: bool,
) -> None:
    """Adds the rows of one network."""
    case, cuda, base = CASES[name], device.startswith("cuda"), 0.0
    count = f"{sum(p.numel() for p in case.build().parameters()):,}"
    for way in (PLAIN, *precisions):
        started = time.perf_counter()
        trained = None if way == PLAIN else federation(case, size, device, way)
        call = plain_loop(case, size, device) if trained is None else partial(_run_round, trained)
        call()
        synchronize(device)
        start = time.perf_counter() - started
        clients = size.clients if trained is not None else min(size.clients, _LOOPED)
        speed = clients * _BATCHES * size.batch / fastest({way: call}, device, seconds)[way]
        base = base or speed
        notes = "" if trained is None else " ".join(trained.engine.notes)
        label = way if trained is None else f"engine vector, {way}".removesuffix(", auto")
        table.add(name, count, label, f"{speed:,.0f}", f"{speed / base:.1f}", f"{start:.1f}", notes)
        if profiled and trained is not None and cuda:
            _profile(trained, table.say)
        del trained, call  # empty_cache frees only what nothing refers to
        if cuda:
            torch.cuda.empty_cache()


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NETWORK", help=f"of {', '.join(CASES)}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=2.0, help="per network and way")
    parser.add_argument("--clients", type=int, default=Size().clients)
    parser.add_argument("--batch", type=int, default=Size().batch)
    parser.add_argument("--precision", action="append", help="float32, tf32 or bf16")
    parser.add_argument("--profile", action="store_true", help="list the slowest GPU operations")
    parser.add_argument("--out", type=Path, help="also write the table as JSON")
    options = parser.parse_args(arguments)
    run(
        options.names,
        options.device,
        options.seconds,
        Size(options.clients, options.batch),
        options.precision or (),
        options.out,
        profiled=options.profile,
    )
