"""What clients keep between visits: one row a (client, mode), made when the client first trains the
mode.
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
from ...errors import InputError, StoreError
from ...flat_params import Tree, payload_bytes
from ...runtime.oom import OOM_ERRORS, out_of_memory, raise_on_oom
from ...runtime.oom import free_bytes as _free

Placement = Literal["auto", "device", "host", "disk"]
_SHARE = {"device": 0.3, "host": 0.5}  # of what is free: the rest is for training
_MODES = 1 << 24  # a visit's number is client * _MODES + mode


class ClientMemory:
    """A growing table of rows by (client, mode); a client's memory of one mode never meets
    another's.

    Where the rows lie never changes a number, only what they cost: on the device they cost its
    memory, on the host (pinned, beside a GPU) a copy a visit, on disk a file without a name, which
    is gone with the process.

    Args:
        device: where visits are trained.
        placement: "device", "host", "disk", or "auto": the first of them that has room, and the
            next when it is full.

    >>> memory = ClientMemory()
    >>> memory.write(Plan(torch.tensor([7]), torch.tensor([0])), {"h": torch.ones(1, 2)})
    >>> memory.read(Plan(torch.tensor([7, 7]), torch.tensor([0, 1])), {"h": torch.zeros(2, 2)})["h"].tolist()
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
        self.table: Tree = {}
        # by number
        self._number, self._row = (
            torch.empty(0, dtype=torch.int64),
            torch.empty(0, dtype=torch.int64),
        )
        self._files: dict[str, IO[bytes]] = {}
        finalize(self, _close, self._files)

    def __len__(self) -> int:
        """Rows there are."""
        return len(self._number)

    def read(self, plan: Plan, fresh: Tree) -> Tree:
        """Rows of the plan's visits, [J, ...]; `fresh` where there is none yet."""
        row = self._rows(_numbers(plan))
        if not fresh or not self.table or int(row.max()) < 0:
            return fresh
        found = (row >= 0).unsqueeze(-1).to(self.device)
        return {
            name: torch.where(found, self._taken(name, row.clamp(min=0)), new)
            for name, new in fresh.items()
        }

    def aside(self, rows: Tree) -> Tree:
        """A round's new rows as they wait for its end: not on the device, if that has no room for
        memory.
        """
        return (
            rows if self.where == "device" else {name: value.cpu() for name, value in rows.items()}
        )

    def write(self, plan: Plan, rows: Tree) -> None:
        """Keeps the rows of the plan's visits."""
        self.write_all([(plan, rows)])

    def write_all(self, kept: Sequence[tuple[Plan, Tree]]) -> None:
        """Keeps the rows of several plans' visits; where there is no room for all, it raises and
        keeps none.
        """
        kept = [(plan, rows) for plan, rows in kept if rows]
        if not kept:
            return
        numbers = torch.cat([_numbers(plan) for plan, _ in kept])
        row = self._rows(numbers)
        new = row < 0
        row[new] = torch.arange(len(self), len(self) + int(new.sum()))
        self._make_room(len(self) + int(new.sum()), kept[0][1])
        for place, (_, rows) in zip(
            torch.split(row, [len(plan.client) for plan, _ in kept]), kept, strict=True
        ):
            for name, value in rows.items():
                held = self.table[name]
                held[place.to(held.device)] = value.to(held.device)
        self._number, order = torch.sort(torch.cat([self._number, numbers[new]]))
        self._row = torch.cat([self._row, row[new]])[order]

    def tensors(self) -> Tree:
        """All rows in the order in which they were made, for a checkpoint; nothing is copied."""
        if not len(self):
            return {}
        number = self._number[torch.argsort(self._row)]
        rows = {f"row.{name}": table[: len(self)] for name, table in self.table.items()}
        return {"visits": torch.stack([number // _MODES, number % _MODES], 1), **rows}

    def load(self, tensors: Tree) -> None:
        """Puts back what `tensors` gave."""
        self.table = {}
        _close(self._files)
        rows = {
            name.removeprefix("row."): table
            for name, table in tensors.items()
            if name.startswith("row.")
        }
        visits = tensors.get("visits", torch.empty(0, 2, dtype=torch.int64)).cpu()
        if len(visits):
            self._make_room(len(visits), rows)
            for name, value in rows.items():
                self.table[name][: len(visits)].copy_(value)
        self._number, self._row = torch.sort(_numbers(Plan(visits[:, 0], visits[:, 1])))

    def _rows(self, numbers: Tensor) -> Tensor:
        """The row of each visit, -1 where there is none."""
        if not len(self):
            return torch.full_like(numbers, -1)
        at = torch.searchsorted(self._number, numbers).clamp(max=len(self) - 1)
        return torch.where(self._number[at] == numbers, self._row[at], -1)

    def _taken(self, name: str, row: Tensor) -> Tensor:
        table = self.table[name]
        if table.device.type == self.device.type:
            return table[row.to(self.device)]
        pinned = torch.empty(len(row), *table.shape[1:], dtype=table.dtype, pin_memory=True)
        return torch.index_select(table, 0, row, out=pinned).to(self.device)

    def _make_room(self, needed: int, like: Tree) -> None:
        """Tables of at least `needed` rows, in a place that has room for some more."""
        held = min((len(table) for table in self.table.values()), default=0)
        if needed <= held:
            return
        room = max(needed, held * 3 // 2)
        while self.placement == "auto" and self.where != "disk":
            if room * payload_bytes(like) <= _SHARE[self.where] * _free(
                self.device if self.where == "device" else None
            ):
                try:
                    return self._grow(room, like)
                except OOM_ERRORS as error:  # free memory may lie in pieces
                    if not out_of_memory(error):
                        raise
            self.where = "host" if self.where == "device" else "disk"
        advice = (
            "use engine.options.client_memory 'auto' or 'disk', or a method without client memory"
        )
        with raise_on_oom(
            "Clients' memory does",
            self.device if self.where == "device" else torch.device("cpu"),
            advice,
        ):
            self._grow(room, like)

    def _grow(self, room: int, like: Tree) -> None:
        """Tables of `room` rows; where it fails, those that are not there yet are as they were."""
        for name, value in like.items():
            before, copied = self.table.get(name), name in self._files  # a file grows where it is
            grown = self._new(name, room, value)
            if before is not None and not copied:
                grown[: len(self)].copy_(before[: len(self)])
            self.table[name] = grown

    def _new(self, name: str, count: int, like: Tensor) -> Tensor:
        """A table of `count` rows, filled with nothing in particular."""
        shape = (count, *like.shape[1:])
        if self.where == "disk":
            return self._on_disk(name, shape, like.dtype)
        device = self.device if self.where == "device" else torch.device("cpu")
        pinned = self.where == "host" and self.device.type == "cuda"
        return torch.empty(shape, dtype=like.dtype, device=device, pin_memory=pinned)

    def _on_disk(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A table that lies in a file; the operating system decides which pages of it are in
        memory.
        """
        size = torch.Size(shape).numel() * dtype.itemsize
        try:
            file = (
                self._files[name] if name in self._files else TemporaryFile(prefix="fedensemble-")
            )
            # a full disk must be said here: later it would kill the process
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
            pages = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise StoreError(
                f"Client memory needs {size / 2**30:.1f} GiB in {gettempdir()}: {error.strerror or error}. "
                "Free some space, or point TMPDIR to another disk."
            ) from None
        self._files[name] = file
        return torch.frombuffer(pages, dtype=dtype).reshape(tuple(shape))


def _close(files: dict[str, IO[bytes]]) -> None:
    for file in files.values():
        file.close()
    files.clear()


def _numbers(plan: Plan) -> Tensor:
    return plan.client.cpu() * _MODES + plan.mode.cpu()
