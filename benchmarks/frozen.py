"""Adapters on a frozen transformer: memory, bytes and time, with the body once and per mode.

    python benchmarks/frozen.py [--device cpu] [--precision float32] [--width 256] [--layers 4]

Each way runs in a process of its own, so that its peak of memory is its own. "per mode" is a body
with values of its own in each mode, which is kept with the buffers: of each mode, of each visit,
and in each message.
"""

from __future__ import annotations

import argparse
import copy
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import fedensemble as fe

WAYS = ("once", "per mode")
CLIENTS, BATCH, LENGTH, RANK, MODES = 20, 16, 32, 4, 5


class LoRA(nn.Module):
    """A frozen linear layer, plus a trained matrix of low rank."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        scale = layer.in_features**-0.5
        self.low = nn.Parameter(torch.randn(layer.in_features, RANK) * scale)
        self.high = nn.Parameter(torch.zeros(RANK, layer.out_features))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + x @ self.low @ self.high
        return out


class Tuned(nn.Module):
    """Frozen transformer layers with adapters around their feed-forward layers, and a head.

    Args:
        body: the layers.
        noise: adds noise to the body, so that each mode has another.
    """

    def __init__(self, body: nn.ModuleList, noise: bool) -> None:
        super().__init__()
        self.body = copy.deepcopy(body).requires_grad_(False)
        for parameter in self.body.parameters() if noise else ():
            parameter.add_(1e-4 * torch.randn_like(parameter))
        for layer in self.body:
            layer.linear1, layer.linear2 = LoRA(layer.linear1), LoRA(layer.linear2)
        self.head = nn.Linear(body[0].linear1.in_features, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.body:
            x = layer.norm1(x + layer.self_attn(x, x, x, need_weights=False)[0])
            x = layer.norm2(x + layer.linear2(torch.relu(layer.linear1(x))))
        out: Tensor = self.head(x.mean(1))
        return out


def measure(way: str, device: str, precision: str, width: int, layers: int) -> str:
    """Trains three rounds; returns a row of the table."""
    torch.manual_seed(0)
    each = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    body = nn.ModuleList(copy.deepcopy(each) for _ in range(layers))
    x = torch.randn(CLIENTS * BATCH, LENGTH, width)
    data = fe.FederatedData.from_arrays(x, (x.mean((1, 2)) > 0).long(), [BATCH] * CLIENTS)
    cuda = device.startswith("cuda")
    federation = fe.Federation(
        lambda: Tuned(body, way != "once"),
        data,
        fe.FedAvg(lr=0.1),
        modes=MODES,
        batch_size=BATCH,
        device=device,
        engine_options={"block": CLIENTS, **({"precision": precision} if cuda else {})},
    )
    clock = time.perf_counter if cuda else time.process_time
    federation.train(1)
    if cuda:
        torch.cuda.synchronize()
    started = clock()
    report = federation.train(2)[-1]
    if cuda:
        torch.cuda.synchronize()
    seconds = (clock() - started) / 2
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    if cuda:
        peak = torch.cuda.max_memory_allocated() / 1e6
    state = federation.state.modes["theta"].nbytes + federation.state.buffers.nbytes
    with tempfile.TemporaryDirectory() as folder:
        saved = federation.save(Path(folder) / "run")
        size = sum(file.stat().st_size for file in saved.rglob("*") if file.is_file())
    numbers = (report.bytes_up / CLIENTS, state, federation.model.frozen_bytes)
    columns = [f"{number / 1e6:.2f}" for number in numbers]
    return " | ".join([way, *columns, f"{peak:,.0f}", f"{size / 1e6:.1f}", f"{seconds:.3f}"])


def main() -> None:
    """Runs each way in its own process and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--way", choices=WAYS, help="run this way only, and print its row")
    given = parser.parse_args()
    if given.way:
        row = measure(given.way, given.device, given.precision, given.width, given.layers)
        print(f"| {row} |")
        return
    print("| body | upload of a visit, MB | modes, MB | frozen, MB | peak, MB | folder, MB | s |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    for way in WAYS:
        subprocess.run([sys.executable, *sys.argv, "--way", way], check=True)


if __name__ == "__main__":
    main()
