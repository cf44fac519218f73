"""Compute and network speeds of clients: log-normal, or from a trace of real devices."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import torch
from torch import Tensor

from .. import prng
from ..errors import InputError, setting

COLUMNS = ("compute_ms_per_sample", "bandwidth_kbps")


def log_normal(
    client: Tensor, median: tuple[float, float], spread: tuple[float, float], seed: int
) -> Tensor:
    """Milliseconds per sample and kbit/s of each client, log-normal, [J, 2].

    Args:
        client: clients, [J].
        median, spread: of both columns: the median, and the standard deviation of the logarithm.
    """
    normal = prng.normal(prng.key(seed, "device", client), 2)
    return torch.tensor(median, dtype=torch.float64) * torch.exp(
        torch.tensor(spread, dtype=torch.float64) * normal
    )


def from_trace(client: Tensor, trace: Tensor, seed: int) -> Tensor:
    """The speeds of one random device of a trace [R, 2] per client, [J, 2]."""
    row = prng.uniform(prng.key(seed, "device", client), 1)[:, 0] * len(trace)
    return trace[row.long()]


def read_trace(path: str) -> Tensor:
    """Speeds of R devices from a CSV file, one line per device, [R, 2] float64.

    The file has the columns compute_ms_per_sample and bandwidth_kbps.
    """
    rows = []
    try:
        with open(Path(path).expanduser(), newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise InputError(
                    f"{path} needs the columns {' and '.join(COLUMNS)}; "
                    f"it has {', '.join(reader.fieldnames or ())}."
                )
            for line in reader:
                rows.append(
                    [
                        _parse_positive(line[name], f"{path}, line {reader.line_num}, {name}")
                        for name in COLUMNS
                    ]
                )
    except OSError as error:
        raise InputError(
            f"Cannot read {setting('participation.trace')} {path}: {error.strerror or error}."
        ) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} is not a CSV file of device speeds: {error}.") from None
    if not rows:
        raise InputError(f"{path} has no devices: it needs at least one line below its header.")
    return torch.tensor(rows, dtype=torch.float64)


def _parse_positive(text: str | None, where: str) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise InputError(f"{where} must be a number above 0; got {text!r}.")
    return value
