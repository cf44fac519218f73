"""Tables and a figure of a partition: sizes and labels of the clients."""

from __future__ import annotations

from pathlib import Path

import torch

from ..data import FederatedData
from .figures.plots import partition_figure, save
from .tables.result_table import TextTable


def write_data_report(data: FederatedData, picture: Path | None) -> tuple[list[TextTable], str]:
    """Tables of sizes and labels, and a sentence about the figure.

    Args:
        picture: the file of the figure, clients by classes; None draws nothing.
    """
    sizes = data.size.double()
    quartiles = torch.quantile(sizes, torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0], dtype=torch.double))
    tests = 0 if data.x_test is None else len(data.x_test)
    facts = [
        ("clients", f"{len(data)}"),
        ("training examples", f"{len(data.x)}"),
        ("test examples", f"{tests}"),
        ("shape of an input", f"{tuple(data.x.shape[1:])}"),
        ("examples per client, min", f"{quartiles[0]:.0f}"),
        ("examples per client, quartiles", " ".join(f"{q:.0f}" for q in quartiles[1:4])),
        ("examples per client, max", f"{quartiles[4]:.0f}"),
    ]
    title = f"{data.info.get('source', 'data')}, partition {data.info.get('partition', '?')}"
    tables = [TextTable(title, ("what", "value"), tuple(facts))]
    if data.classes is not None and data.y.dim() == 1:
        counts = data.label_counts()
        holders = (counts > 0).sum(0)
        totals = counts.sum(0)
        names = data.class_names or [str(c) for c in range(data.classes)]
        rows = tuple(
            (names[c], f"{totals[c]}", f"{holders[c]}", _bar(totals[c], totals.max()))
            for c in range(data.classes)
        )
        per_client = (counts > 0).sum(1)
        low, high = int(per_client.min()), int(per_client.max())
        classes = f"exactly {low}" if low == high else f"{low} to {high}"
        title = f"Labels; a client has {classes} classes"
        tables.append(TextTable(title, ("class", "examples", "clients", ""), rows))
    return tables, _draw_figure(data, picture)


def _draw_figure(data: FederatedData, picture: Path | None) -> str:
    if data.classes is None or data.y.dim() != 1:
        return "No picture: the examples have no single class." if picture else ""
    if picture is None:
        return "For a picture of the classes that each client holds, add -o partition.png."
    return f"Picture: {save(partition_figure(data), picture)}"


def _bar(value: torch.Tensor, most: torch.Tensor, width: int = 30) -> str:
    return "█" * max(1, round(width * float(value) / float(most))) if value > 0 else ""
