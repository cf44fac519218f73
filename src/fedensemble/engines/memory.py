"""What clients keep between visits: one row a (client, mode), made when the client first trains the mode."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.types import Plan
from ..vectors import Tree


class ClientMemory:
    """A growing table of rows by (client, mode); a client's memory of one mode never meets another's.

    >>> memory = ClientMemory()
    >>> plan = Plan(torch.tensor([7]), torch.tensor([0]))
    >>> memory.write(plan, {"h": torch.ones(1, 2)})
    >>> memory.read(Plan(torch.tensor([7, 7]), torch.tensor([0, 1])), {"h": torch.zeros(2, 2)})["h"].tolist()
    [[1.0, 1.0], [0.0, 0.0]]
    """

    def __init__(self) -> None:
        self.row: dict[tuple[int, int], int] = {}
        self.table: Tree = {}

    def read(self, plan: Plan, fresh: Tree) -> Tree:
        """Rows of the plan's visits, [J, ...]; `fresh` where there is none yet."""
        known = [self.row.get(visit, -1) for visit in _visits(plan)]
        if not fresh or not self.table or max(known) < 0:
            return fresh
        place = torch.tensor(known, device=next(iter(fresh.values())).device)
        found = (place >= 0).unsqueeze(-1)
        return {name: torch.where(found, self.table[name][place.clamp(min=0)], new) for name, new in fresh.items()}

    def write(self, plan: Plan, rows: Tree) -> None:
        """Keeps the rows of the plan's visits."""
        if not rows:
            return
        for visit in _visits(plan):
            self.row.setdefault(visit, len(self.row))
        place = torch.tensor([self.row[visit] for visit in _visits(plan)])
        for name, value in rows.items():
            self._make_room(name, value)
            self.table[name][place.to(value.device)] = value

    def tensors(self) -> Tree:
        """All rows, for a checkpoint."""
        if not self.row:
            return {}
        visits = torch.tensor(list(self.row))
        rows = {f"row.{name}": table[: len(self.row)].contiguous() for name, table in self.table.items()}
        return {"visits": visits, **rows}

    def load(self, tensors: Tree, device: torch.device) -> None:
        """Puts back what `tensors` gave."""
        visits = tensors["visits"].tolist() if "visits" in tensors else []
        self.row = {(client, mode): place for place, (client, mode) in enumerate(visits)}
        self.table = {n.removeprefix("row."): t.to(device) for n, t in tensors.items() if n.startswith("row.")}

    def _make_room(self, name: str, like: Tensor) -> None:
        table = self.table.get(name)
        if table is None or len(table) < len(self.row):
            room = max(len(self.row), 2 * len(table) if table is not None else 0)
            bigger = like.new_zeros(room, *like.shape[1:])
            if table is not None:
                bigger[: len(table)] = table
            self.table[name] = bigger


def _visits(plan: Plan) -> list[tuple[int, int]]:
    return list(zip(plan.client.tolist(), plan.mode.tolist(), strict=True))
