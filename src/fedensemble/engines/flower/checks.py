"""What a client's answer must be before it counts; one that is not is refused, and the round goes on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from flwr.app import Message
from torch import Tensor

from ...core.algorithm import Algorithm
from ...errors import InputError
from ...vectors import Tree, row_bytes, rows
from .wire import BUFFERS, UPLOAD, UnreadableError, Visit, number, read_visit, unpack


@dataclass(frozen=True)
class Limits:
    """What is plausible in an answer.

    Args:
        value: largest absolute value of any number in an upload.
        examples: most examples that a client may say it has.
        clip: largest distance of an upload from that of a client that learned nothing, or None; a longer one is
            shortened. Each upload is measured against the mode it was trained from.
    """

    value: float = 1e6
    examples: int = 10_000_000
    clip: float | None = None

    def __post_init__(self) -> None:
        if not self.value > 0 or self.examples < 1 or (self.clip is not None and not self.clip > 0):
            raise InputError(f"Limits on answers must be positive; got {self}.")


@dataclass(frozen=True)
class Answer:
    """An answer that counts."""

    uploads: Tree  # [P]
    buffers: Tensor  # change of running statistics, [R]
    loss: float
    bytes_up: int
    forgot: bool  # whether the client had lost its memory of the mode


def check_answer(
    message: Message, visit: Visit, algorithm: Algorithm, still: Tree, buffers: Tensor, coin: Tensor, examples: int,
    limits: Limits,
) -> Answer:  # fmt: skip
    """The answer in a message; raises UnreadableError, with the reason, if it must not count.

    Args:
        visit: what the client was asked.
        still: what a client that learned nothing would upload for each mode, [K, P].
        buffers: running statistics of each mode, [K, R].
        coin: of each mode, [K, 1].
        examples: how many the client had when it was enrolled.
    """
    content, mode = message.content, visit.mode
    said = read_visit(content)
    for name, want, got in zip(Visit._fields, visit, said, strict=True):
        if want != got:
            raise UnreadableError(f"it answers for {name} {got}, and was asked for {want}")
    if number(content, "examples", int) != examples:
        raise UnreadableError(f"it says {number(content, 'examples', int)} examples, and was enrolled with {examples}")
    like = rows(still, mode)
    expected = {**algorithm.encode(like, coin[mode]), **({BUFFERS: buffers[mode]} if buffers.shape[-1] else {})}
    sent = unpack(content, UPLOAD, expected)
    moved = sent.get(BUFFERS, torch.zeros_like(buffers[mode]))
    try:
        uploads = algorithm.decode({n: value for n, value in sent.items() if n != BUFFERS}, like, coin[mode])
    except Exception as error:  # whatever a stranger's bytes make of a decoder
        raise UnreadableError(f"its encoding cannot be read: {error}") from None
    for name, value in {**uploads, BUFFERS: moved}.items():
        if not bool(value.isfinite().all()):
            raise UnreadableError(f"'{name}' has values that are not finite")
        if value.numel() and float(value.abs().max()) > limits.value:
            raise UnreadableError(f"'{name}' has values up to {float(value.abs().max()):.3g}, above {limits.value:g}")
    loss = number(content, "loss", float)
    if not math.isfinite(loss):
        raise UnreadableError(f"its loss is {loss}, first in local step {number(content, 'first_bad_step', int) + 1}")
    return Answer(
        uploads=_clipped(uploads, like, limits.clip),
        buffers=moved,
        loss=loss,
        bytes_up=row_bytes(sent),
        forgot=number(content, "forgot", int) == 1,
    )


def _clipped(uploads: Tree, still: Mapping[str, Tensor], clip: float | None) -> Tree:
    """Uploads no further than `clip` from those of a client that learned nothing; each tensor by itself."""
    if clip is None:
        return uploads
    clipped = {}
    for name, value in uploads.items():
        # A single number, such as the flag of a first visit, is no update: shortened, it would mean something else.
        if value.shape[-1] == 1:
            clipped[name] = value
            continue
        change = value - still[name]
        length = float(change.norm())
        clipped[name] = value if length <= clip else still[name] + change * (clip / length)
    return clipped
