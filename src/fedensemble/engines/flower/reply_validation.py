"""What a client's answer must be before it counts; one that is not is refused, and the round goes
on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from flwr.app import Message, RecordDict
from torch import Tensor

from ...core.algorithm import Algorithm
from ...errors import InputError
from ...flat_params import Tree, payload_bytes, rows
from .messages import (
    BUFFERS,
    UPLOAD,
    UnreadableError,
    Visit,
    check_records,
    number,
    read_visit,
    unpack,
)
from .running_statistics import Statistics


@dataclass(frozen=True)
class Limits:
    """What an answer may be, and what a round does with answers; the defaults change nothing that
    is plausible.

    Args:
        value: largest absolute change of any number in an upload, against that of a client that
            learned nothing.
        examples: most examples that a client may say it has.
        clip: largest distance of an upload from that of a client that learned nothing, or None; a
            longer one is shortened. Each tensor, and the change of running statistics, is measured
            by itself.
        clip_factor: the same as a multiple of the median length of the clients' updates, or None.
        refuse_factor: multiple of the median length above which an answer is refused, or None.
        loss: largest loss.
        least_loss: smallest loss; 0 where the loss cannot be negative.
        min_cohort: clients without whom a mode is not updated in a round.
        max_weight: most that a client counts, as a multiple of the median number of examples, or
            None.
        suspend_after: failures in a row after which a client is suspended, or None.
    """

    value: float = 1e6
    examples: int = 10_000_000
    clip: float | None = None
    clip_factor: float | None = None
    refuse_factor: float | None = None
    loss: float = 1e30
    least_loss: float = -math.inf
    min_cohort: int = 1
    max_weight: float | None = None
    suspend_after: int | None = None

    def __post_init__(self) -> None:
        values = {
            name: value
            for name, value in vars(self).items()
            if name != "least_loss" and value is not None
        }
        if not all(value > 0 for value in values.values()):
            raise InputError(f"Limits on answers must be positive; got {self}.")
        if not self.loss <= 1e30:  # the mean over a million clients must be finite in float32
            raise InputError(f"The run's setting `max-loss` is at most 1e30; got {self.loss:g}.")
        if self.max_weight is not None and self.max_weight < 1:
            raise InputError(
                f"The run's setting `max-weight` is at least 1, or 0 for none; got {self.max_weight:g}."
            )


@dataclass(frozen=True)
class Answer:
    """An answer that counts."""

    uploads: Tree  # [P]
    buffers: Tensor  # change of running statistics, [R]
    loss: float
    bytes_up: int
    forgot: bool  # whether the client had lost its memory of the mode


def check_answer(
    message: Message,
    visit: Visit,
    algorithm: Algorithm,
    still: Tree,
    buffers: Tensor,
    coin: Tensor,
    examples: int,
    limits: Limits,
    statistics: Statistics | None = None,
) -> Answer:
    """The answer in a message; raises UnreadableError, with the reason, if it must not count.

    Args:
        visit: what the client was asked.
        still: what a client that learned nothing would upload for each mode, [K, P].
        buffers: running statistics of each mode, [K, R].
        coin: of each mode, [K, 1].
        examples: how many the client had when it was enrolled.
        statistics: what is known of the entries of `buffers`.
    """
    content, mode = message.content, visit.mode
    check_records(content)
    for name, want, got in zip(Visit._fields, visit, read_visit(content), strict=True):
        if want != got:
            raise UnreadableError(f"it answers for {name} {got}, and was asked for {want}")
    if number(content, "examples", int) != examples:
        raise UnreadableError(
            f"it says {number(content, 'examples', int)} examples, and was enrolled with {examples}"
        )
    like = rows(still, mode)
    expected = {
        **algorithm.encode(like, coin[mode]),
        **({BUFFERS: buffers[mode]} if buffers.shape[-1] else {}),
    }
    sent = unpack(content, UPLOAD, expected)
    moved = sent.get(BUFFERS, torch.zeros_like(buffers[mode]))
    try:
        uploads = algorithm.decode(
            {n: value for n, value in sent.items() if n != BUFFERS}, like, coin[mode]
        )
    except Exception as error:  # whatever a stranger's bytes make of a decoder
        raise UnreadableError(f"its encoding cannot be read: {error}") from None
    for name, value in uploads.items():
        _check_change(name, value, value - like[name], limits.value)
    _check_change(BUFFERS, moved, moved, limits.value)
    if statistics is not None:
        statistics.check(buffers[mode], moved)
    return Answer(
        uploads={name: _clip(value, like[name], limits.clip) for name, value in uploads.items()},
        buffers=_clip(moved, torch.zeros_like(moved), limits.clip),
        loss=_check_loss(content, buffers.dtype, limits),
        bytes_up=payload_bytes(sent),
        forgot=number(content, "forgot", int) == 1,
    )


def _check_change(name: str, value: Tensor, change: Tensor, most: float) -> None:
    """Raises if a tensor has values that are not finite, or changes by more than `most`.

    The change is measured and not the value: once a model is large, for whatever reason, honest
    clients' uploads are large too.
    """
    if not bool(value.isfinite().all()):
        raise UnreadableError(f"'{name}' has values that are not finite")
    if change.numel() and not float(change.abs().max()) <= most:
        raise UnreadableError(
            f"'{name}' has values that change by up to {float(change.abs().max()):.3g}, above {most:g}"
        )


def _check_loss(content: RecordDict, dtype: torch.dtype, limits: Limits) -> float:
    """A client's loss; raises if it is not one in the run's own precision, in which 1e39 may be
    infinite.
    """
    loss = number(content, "loss", float)
    if not bool(torch.tensor(loss, dtype=dtype).isfinite()):
        raise UnreadableError(
            f"its loss is {loss}, first in local step {number(content, 'first_bad_step', int) + 1}"
        )
    if not limits.least_loss <= loss <= limits.loss:
        raise UnreadableError(
            f"its loss is {loss:.3g}, and {limits.least_loss:g} to {limits.loss:g} is plausible"
        )
    return float(loss)


def _clip(value: Tensor, still: Tensor, clip: float | None) -> Tensor:
    """A tensor no further than `clip` from that of a client that learned nothing.

    A single number, such as a flag or a counter, is no update: shortened, it would mean something
    else.
    """
    if clip is None or value.shape[-1] == 1:
        return value
    length = float((value - still).norm())
    return value if length <= clip else still + (value - still) * (clip / length)
