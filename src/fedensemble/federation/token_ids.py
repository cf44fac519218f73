"""Whole numbers that a model has no place for: found on the CPU before training, for a GPU ends the
process on them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..data.federated import FederatedData
from ..errors import InputError, first_line
from ..modeling.factory import RNG_LOCK
from ..runtime.oom import out_of_memory

_CHUNK = 1 << 16  # rows searched at once
_WORTH = 8192  # positions that a model is tried on, of all rows together
_AT_LEAST, _AT_ONCE = 8, 32  # rows


def check_tokens(model: nn.Module, data: FederatedData) -> None:
    """Runs rows with the largest and the smallest number of every position through a model on the
    CPU.
    """
    if data.standardise is not None:
        return
    for name, x in (
        ("the clients' data", data.x),
        ("the test data", data.x_test),
        ("x_server", data.x_server),
    ):
        if x is None or x.is_floating_point() or not x.numel():
            continue
        for rows in torch.split(extreme_rows(x), _AT_ONCE):
            few = rows[torch.arange(max(len(rows), _AT_LEAST), device=rows.device) % len(rows)]
            given = x[few].cpu()
            if (error := _failure(model, given)) is None:
                continue
            if out_of_memory(error) or (found := _culprit(model, given)) is None:
                return  # it takes no such inputs at all: whoever tries it next says why
            row = int(few[found[0]])
            where = _owner(data, row) if x is data.x else f"row {row} of {name}"
            raise InputError(
                _message(model, where, given[found[0]].expand_as(given), found[1], int(x.max()))
            )


def extreme_rows(x: Tensor) -> Tensor:
    """Rows that together hold the largest and the smallest number of every position; of many, those
    that go furthest.

    >>> extreme_rows(torch.tensor([[3, 1], [2, 2], [0, 9], [1, 0]])).tolist()
    [0, 2, 3]
    """
    flat, found = x.reshape(len(x), -1), set[int]()
    most = max(_AT_LEAST, _WORTH // flat.shape[1])
    for sign, extreme, place in ((-1, torch.amax, torch.argmax), (1, torch.amin, torch.argmin)):
        # fast, [chunks, positions]
        reached = torch.stack([extreme(part, 0) for part in torch.split(flat, _CHUNK)])
        chunk, rows = (
            place(reached, 0),
            torch.empty(flat.shape[1], dtype=torch.int64, device=x.device),
        )
        for at in sorted(set(chunk.tolist())):  # slower, but seldom more than a chunk or two
            here = chunk == at
            rows[here] = at * _CHUNK + place(flat[at * _CHUNK : (at + 1) * _CHUNK, here], 0)
        furthest = torch.argsort(sign * extreme(reached, 0).long(), stable=True)
        found |= set(list(dict.fromkeys(rows[furthest].tolist()))[: most // 2])
    return torch.tensor(sorted(found), device=x.device)


def _failure(model: nn.Module, x: Tensor) -> Exception | None:
    """What a model raises on inputs, which are a copy: it may write into them."""
    try:
        with RNG_LOCK, torch.random.fork_rng(devices=[]), torch.no_grad():
            model(x.clone())
    except Exception as error:
        return error
    return None


def _culprit(model: nn.Module, given: Tensor) -> tuple[int, Tensor] | None:
    """The first row that a model fails on, as many of it as there were rows, and one that it takes,
    if any.
    """
    fails = [_failure(model, row.expand_as(given)) is not None for row in given]
    good = torch.zeros_like(given[0]) if all(fails) else given[fails.index(False)]
    if not any(fails) or _failure(model, good.expand_as(given)) is not None:
        return None
    return fails.index(True), good


def _owner(data: FederatedData, row: int) -> str:
    """Whose row it is, and which of theirs."""
    start, size = data.start.cpu(), data.size.cpu()
    owners = torch.nonzero((start <= row) & (row < start + size)).flatten().tolist()
    if not owners or len(data) == 1:  # on a client's own machine nobody counts clients
        return f"row {row} of the clients' data"
    name = f" ({data.names[owners[0]]})" if data.names is not None else ""
    return f"row {row - int(start[owners[0]])} of client {owners[0]}{name}"


def _message(model: nn.Module, where: str, given: Tensor, good: Tensor, highest: int) -> str:
    """What is wrong with a row, `given` over and over: the number that also spoils a good one, if
    one does.
    """
    sizes = [
        module.num_embeddings
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    ]
    for value in sorted(set(given[0].flatten().tolist())):
        if (error := _failure(model, torch.where(given == value, given, good))) is None:
            continue
        holds = f"{where} holds {value} (the largest number there is {highest})"
        if len(sizes) == 1 and not 0 <= value < sizes[0]:
            known = f"The model embeds {sizes[0]} tokens, 0 to {sizes[0] - 1}"
            return f"{known}, but {holds}. Enlarge the embedding, or number the tokens anew."
        return f"The model fails where {holds}: {first_line(error)}. Make room for it, or number what it takes anew."
    return f"The model takes other rows, but not {where}: {first_line(_failure(model, given) or ValueError())}."
