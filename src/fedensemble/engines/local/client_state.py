"""State that clients keep between visits, such as control variates: one row per (client, mode).

A row is created when a client trains a mode for the first time.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from tempfile import TemporaryFile, gettempdir
from typing import IO, Literal, get_args
from weakref import finalize

import torch
from torch import Tensor

from ...core.types import Plan
from ...errors import InputError, StoreError, setting
from ...flat_params import Tree, payload_bytes
from ...runtime.oom import OOM_ERRORS, free_bytes, out_of_memory, raise_on_oom

Placement = Literal["auto", "device", "host", "disk"]
# Fraction of the free memory that client state may take; the rest is left for training.
_MAX_FRACTION = {"device": 0.3, "host": 0.5}
_MODE_STRIDE = 1 << 24  # (client, mode) is stored as one integer: client * _MODE_STRIDE + mode


class ClientMemory:
    """A growing table of client state, with one row per (client, mode).

    With N clients and K modes of P parameters, the state of a method such as SCAFFOLD takes up to
    N * K * P values, which may exceed the memory of a GPU or of the host. The placement of the rows
    changes no results, only the cost:

    - "device": in the memory of the device, no transfers.
    - "host": in the memory of the host (pinned if the device is a GPU); each visit copies its rows
      to the device and back.
    - "disk": in an unlinked temporary file, mapped into memory. The operating system removes it
      when the process ends, however it ends.

    Args:
        device: where visits are trained.
        placement: "device", "host", "disk", or "auto". With "auto" the table starts in the first of
            them that has enough free memory and moves to the next when it outgrows it.

    >>> memory = ClientMemory()
    >>> memory.write(Plan(torch.tensor([7]), torch.tensor([0])), {"h": torch.ones(1, 2)})
    >>> plan = Plan(torch.tensor([7, 7]), torch.tensor([0, 1]))
    >>> memory.read(plan, {"h": torch.zeros(2, 2)})["h"].tolist()
    [[1.0, 1.0], [0.0, 0.0]]
    """

    def __init__(self, device: torch.device | str = "cpu", placement: Placement = "auto") -> None:
        if placement not in get_args(Placement):
            raise InputError(
                f"client_memory is 'auto', 'device', 'host' or 'disk'; got {placement!r}."
            )
        self.device, self.placement = torch.device(device), placement
        places = ("device", "host", "disk") if self.device.type == "cuda" else ("host", "disk")
        self.where = places[0] if placement == "auto" or placement not in places else placement
        # Rows are appended in the order in which visits first happen, and the table has spare rows
        # at its end. `_ids` is sorted, and row `_row_of_id[i]` belongs to the visit `_ids[i]`.
        self.table: Tree = {}
        self._ids = torch.empty(0, dtype=torch.int64)
        self._row_of_id = torch.empty(0, dtype=torch.int64)
        self._files: dict[str, IO[bytes]] = {}
        finalize(self, _close, self._files)

    def __len__(self) -> int:
        """Number of rows in use."""
        return len(self._ids)

    def read(self, plan: Plan, fresh: Tree) -> Tree:
        """The rows of the plan's visits, [J, ...]; those of `fresh` for visits without a row."""
        row = self._find_rows(_visit_ids(plan))
        if not fresh or not self.table or int(row.max()) < 0:
            return fresh
        exists = (row >= 0).unsqueeze(-1).to(self.device)
        return {
            name: torch.where(exists, self._gather(name, row.clamp(min=0)), new)
            for name, new in fresh.items()
        }

    def stage(self, rows: Tree) -> Tree:
        """The new rows of a block, moved to where they wait for the end of the round.

        They wait on the device only if the table is there. Otherwise the device has no memory for
        the state of all visits of a round.
        """
        return (
            rows if self.where == "device" else {name: value.cpu() for name, value in rows.items()}
        )

    def write(self, plan: Plan, rows: Tree) -> None:
        """Stores the rows of the plan's visits."""
        self.write_all([(plan, rows)])

    def write_all(self, updates: Sequence[tuple[Plan, Tree]]) -> None:
        """Stores the rows of the visits of several plans.

        All-or-nothing: memory is allocated before anything is written. If the allocation fails,
        this raises and no row has changed.
        """
        updates = [(plan, rows) for plan, rows in updates if rows]
        if not updates:
            return
        ids = torch.cat([_visit_ids(plan) for plan, _ in updates])
        row = self._find_rows(ids)
        new = row < 0
        row[new] = torch.arange(len(self), len(self) + int(new.sum()))
        self._reserve(len(self) + int(new.sum()), updates[0][1])
        rows_of_plan = torch.split(row, [len(plan.client) for plan, _ in updates])
        for index, (_, rows) in zip(rows_of_plan, updates, strict=True):
            for name, value in rows.items():
                table = self.table[name]
                table[index.to(table.device)] = value.to(table.device)
        self._ids, order = torch.sort(torch.cat([self._ids, ids[new]]))
        self._row_of_id = torch.cat([self._row_of_id, row[new]])[order]

    def tensors(self) -> Tree:
        """All rows in the order of their creation, for a checkpoint; these are views, not copies.

        "visits" [n, 2] holds the pairs (client, mode), "row.<name>" the rows.
        """
        if not len(self):
            return {}
        ids = self._ids[torch.argsort(self._row_of_id)]
        rows = {f"row.{name}": table[: len(self)] for name, table in self.table.items()}
        return {"visits": torch.stack([ids // _MODE_STRIDE, ids % _MODE_STRIDE], 1), **rows}

    def load(self, tensors: Tree) -> None:
        """Replaces all rows by those that `tensors` returned."""
        self.table = {}
        _close(self._files)
        rows = {
            name.removeprefix("row."): table
            for name, table in tensors.items()
            if name.startswith("row.")
        }
        visits = tensors.get("visits", torch.empty(0, 2, dtype=torch.int64)).cpu()
        if len(visits):
            self._reserve(len(visits), rows)
            for name, value in rows.items():
                self.table[name][: len(visits)].copy_(value)
        self._ids, self._row_of_id = torch.sort(_visit_ids(Plan(visits[:, 0], visits[:, 1])))

    def _find_rows(self, ids: Tensor) -> Tensor:
        """The row of each visit, -1 if it has none."""
        if not len(self):
            return torch.full_like(ids, -1)
        at = torch.searchsorted(self._ids, ids).clamp(max=len(self) - 1)
        return torch.where(self._ids[at] == ids, self._row_of_id[at], -1)

    def _gather(self, name: str, row: Tensor) -> Tensor:
        """Rows of a table, on the device."""
        table = self.table[name]
        if table.device.type == self.device.type:
            return table[row.to(self.device)]
        # Gather into a pinned buffer first: one fast transfer instead of one per row.
        pinned = torch.empty(len(row), *table.shape[1:], dtype=table.dtype, pin_memory=True)
        return torch.index_select(table, 0, row, out=pinned).to(self.device)

    def _reserve(self, needed: int, like: Tree) -> None:
        """Makes room for `needed` rows, in the first placement with enough free memory.

        Tables grow by half, so that the cost of copying rows is constant per row on average.
        """
        capacity = min((len(table) for table in self.table.values()), default=0)
        if needed <= capacity:
            return
        capacity = max(needed, capacity * 3 // 2)
        while self.placement == "auto" and self.where != "disk":
            free = free_bytes(self.device if self.where == "device" else None)
            if capacity * payload_bytes(like) <= _MAX_FRACTION[self.where] * free:
                try:
                    return self._grow(capacity, like)
                except OOM_ERRORS as error:  # free memory may be fragmented
                    if not out_of_memory(error):
                        raise
            self.where = "host" if self.where == "device" else "disk"
        device = self.device if self.where == "device" else torch.device("cpu")
        place = setting("engine.options.client_memory")
        advice = f"use 'auto' or 'disk' for {place}, or a method without client state"
        with raise_on_oom("Client state does", device, advice):
            self._grow(capacity, like)

    def _grow(self, capacity: int, like: Tree) -> None:
        """Grows all tables to `capacity` rows; if it fails, every table still has its rows."""
        for name, value in like.items():
            old, same_file = self.table.get(name), name in self._files
            table = self._new(name, capacity, value)
            if old is not None and not same_file:  # a file grows in place and keeps its content
                table[: len(self)].copy_(old[: len(self)])
            self.table[name] = table

    def _new(self, name: str, capacity: int, like: Tensor) -> Tensor:
        """An uninitialized table in the current placement."""
        shape = (capacity, *like.shape[1:])
        if self.where == "disk":
            return self._map_file(name, shape, like.dtype)
        device = self.device if self.where == "device" else torch.device("cpu")
        pinned = self.where == "host" and self.device.type == "cuda"
        return torch.empty(shape, dtype=like.dtype, device=device, pin_memory=pinned)

    def _map_file(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A table in a memory-mapped file; the operating system decides which pages are in RAM."""
        size = torch.Size(shape).numel() * dtype.itemsize
        try:
            file = self._files.get(name) or TemporaryFile(prefix="fedensemble-")  # noqa: SIM115
            # Reserve the disk blocks now. A sparse file would let this succeed on a full disk, and
            # the first write to a page without a block would kill the process with SIGBUS.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
            pages = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise StoreError(
                f"Client state needs {size / 2**30:.1f} GiB in {gettempdir()}: "
                f"{error.strerror or error}. Free some space, or point TMPDIR to another disk."
            ) from None
        self._files[name] = file
        return torch.frombuffer(pages, dtype=dtype).reshape(tuple(shape))


def _close(files: dict[str, IO[bytes]]) -> None:
    for file in files.values():
        file.close()
    files.clear()


def _visit_ids(plan: Plan) -> Tensor:
    return plan.client.cpu() * _MODE_STRIDE + plan.mode.cpu()
