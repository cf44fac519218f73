"""Checks token ids against the model's embeddings, on the CPU before training.

On a GPU, an id outside the embedding is a device-side assert that ends the process.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..data.federated import FederatedData
from ..errors import InputError, first_line
from ..modeling.factory import RNG_LOCK
from ..runtime.oom import out_of_memory

_CHUNK = 1 << 16  # rows searched at once
_MAX_POSITIONS = 8192  # positions of all checked rows together
_MIN_ROWS, _BATCH = 8, 32  # rows per forward pass: at least, at most


def check_tokens(model: nn.Module, data: FederatedData) -> None:
    """Raises if the model fails on rows with the largest or the smallest ids of the data.

    Args:
        model: on the CPU, in eval mode.
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
        for chunk in torch.split(extreme_rows(x), _BATCH):
            # A few rows are repeated, because some models need more than one example.
            rows = chunk[torch.arange(max(len(chunk), _MIN_ROWS), device=chunk.device) % len(chunk)]
            inputs = x[rows].cpu()
            error = _try_forward(model, inputs)
            if error is None:
                continue
            # A model that fails on every row, or for lack of memory, takes no such inputs at all.
            # The next check runs it again and explains why.
            if out_of_memory(error) or (failure := _find_bad_row(model, inputs)) is None:
                return
            place, good_row = failure
            row = int(rows[place])
            where = _name_owner(data, row) if x is data.x else f"row {row} of {name}"
            bad_rows = inputs[place].expand_as(inputs)
            raise InputError(_explain_failure(model, where, bad_rows, good_row, int(x.max())))


def extreme_rows(x: Tensor) -> Tensor:
    """Indices of rows that hold the largest and the smallest value of every position.

    If there are too many positions, only the rows with the most extreme values are returned.

    >>> extreme_rows(torch.tensor([[3, 1], [2, 2], [0, 9], [1, 0]])).tolist()
    [0, 2, 3]
    """
    flat, selected = x.reshape(len(x), -1), set[int]()
    max_rows = max(_MIN_ROWS, _MAX_POSITIONS // flat.shape[1])
    for sign, extreme, arg_extreme in (
        (-1, torch.amax, torch.argmax),
        (1, torch.amin, torch.argmin),
    ):
        # Two passes: `amax` over chunks is fast, `argmax` is slow. So the first pass finds only the
        # chunk that holds each position's extreme value, [chunks, positions]. The second searches
        # the rows of those chunks, which are seldom more than one or two.
        extremes = torch.stack([extreme(part, 0) for part in torch.split(flat, _CHUNK)])
        best_chunk = arg_extreme(extremes, 0)
        rows = torch.empty(flat.shape[1], dtype=torch.int64, device=x.device)
        for chunk in sorted(set(best_chunk.tolist())):
            positions = best_chunk == chunk
            start = chunk * _CHUNK
            rows[positions] = start + arg_extreme(flat[start : start + _CHUNK, positions], 0)
        most_extreme = torch.argsort(sign * extreme(extremes, 0).long(), stable=True)
        selected |= set(list(dict.fromkeys(rows[most_extreme].tolist()))[: max_rows // 2])
    return torch.tensor(sorted(selected), device=x.device)


def _try_forward(model: nn.Module, x: Tensor) -> Exception | None:
    """The error that the model raises on a copy of `x`, or None; a model may write into inputs."""
    try:
        with RNG_LOCK, torch.random.fork_rng(devices=[]), torch.no_grad():
            model(x.clone())
    except Exception as error:
        return error
    return None


def _find_bad_row(model: nn.Module, inputs: Tensor) -> tuple[int, Tensor] | None:
    """The index of the first row that the model fails on, and a row that it accepts, if any.

    Each row is run as a batch of its copies, of the same size as `inputs`.
    """
    fails = [_try_forward(model, row.expand_as(inputs)) is not None for row in inputs]
    good_row = torch.zeros_like(inputs[0]) if all(fails) else inputs[fails.index(False)]
    if not any(fails) or _try_forward(model, good_row.expand_as(inputs)) is not None:
        return None
    return fails.index(True), good_row


def _name_owner(data: FederatedData, row: int) -> str:
    """The client that owns a row, and the row's index within the client."""
    start, size = data.start.cpu(), data.size.cpu()
    owners = torch.nonzero((start <= row) & (row < start + size)).flatten().tolist()
    if not owners or len(data) == 1:  # a single client knows no client numbers
        return f"row {row} of the clients' data"
    name = f" ({data.names[owners[0]]})" if data.names is not None else ""
    return f"row {row - int(start[owners[0]])} of client {owners[0]}{name}"


def _explain_failure(
    model: nn.Module, where: str, bad_rows: Tensor, good_row: Tensor, highest: int
) -> str:
    """The error message for a bad row: names the id that also makes the good row fail, if any.

    Args:
        bad_rows: copies of the bad row, [B, ...].
        highest: the largest id in the data.
    """
    sizes = [
        module.num_embeddings
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    ]
    for token in sorted(set(bad_rows[0].flatten().tolist())):
        error = _try_forward(model, torch.where(bad_rows == token, bad_rows, good_row))
        if error is None:
            continue
        holds = f"{where} holds {token} (the largest value there is {highest})"
        if len(sizes) == 1 and not 0 <= token < sizes[0]:
            known = f"The model embeds {sizes[0]} tokens, 0 to {sizes[0] - 1}"
            return f"{known}, but {holds}. Enlarge the embedding, or renumber the tokens."
        return (
            f"The model fails where {holds}: {first_line(error)}. "
            "Make room for this value, or renumber the inputs."
        )
    reason = first_line(_try_forward(model, bad_rows) or ValueError())
    return f"The model takes other rows, but not {where}: {reason}."
