"""Validates clients' replies. An invalid reply is rejected, and the round continues without it.

The sizes of a reply's tensors are checked in `messages.unpack`, those of a whole request in
`deploy/gateway.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from flwr.app import Message, RecordDict
from torch import Tensor

from ...core.algorithm import Algorithm
from ...errors import InputError
from ...flat_params import Tree, payload_bytes, select_rows
from .messages import (
    BUFFERS,
    REPORTS,
    UPLOAD,
    UnreadableError,
    Visit,
    check_records,
    read_metric,
    read_visit,
    unpack,
)
from .running_statistics import BufferRules


@dataclass(frozen=True)
class Limits:
    """Limits on replies, and how a round treats them. The defaults accept everything plausible.

    Args:
        max_value: largest absolute change of any value in an upload, relative to the upload of a
            client with zero gradient.
        max_examples: largest number of examples that a client may claim.
        clip: largest L2 distance of an upload from that of a client with zero gradient, or None. A
            longer update is scaled down. Each tensor, and the change of the running statistics, is
            measured separately.
        clip_factor: the same as a multiple of the median length of the clients' updates, or None.
        refuse_factor: multiple of the median length above which a reply is rejected, or None.
        max_loss: largest loss.
        min_loss: smallest loss; 0 where the loss cannot be negative.
        min_cohort: a mode with fewer replies is not updated in a round.
        max_weight: largest weight of a client, as a multiple of the median number of examples, or
            None.
        suspend_after: failures in a row after which a client is suspended, or None.
    """

    max_value: float = 1e6
    max_examples: int = 10_000_000
    clip: float | None = None
    clip_factor: float | None = None
    refuse_factor: float | None = None
    max_loss: float = 1e30
    min_loss: float = -math.inf
    min_cohort: int = 1
    max_weight: float | None = None
    suspend_after: int | None = None

    def __post_init__(self) -> None:
        values = {
            name: value
            for name, value in vars(self).items()
            if name != "min_loss" and value is not None
        }
        if not all(value > 0 for value in values.values()):
            raise InputError(f"Limits on replies must be positive; got {self}.")
        # The mean over a million clients must be finite in float32.
        if not self.max_loss <= 1e30:
            raise InputError(
                f"The run's setting `max-loss` is at most 1e30; got {self.max_loss:g}."
            )
        if self.max_weight is not None and self.max_weight < 1:
            raise InputError(
                "The run's setting `max-weight` is at least 1, or 0 for none; "
                f"got {self.max_weight:g}."
            )


@dataclass(frozen=True)
class ValidReply:
    """A reply that passed validation."""

    uploads: Tree  # [P]
    buffers: Tensor  # change of the running statistics, [R]
    loss: float
    bytes_up: int
    state_lost: bool  # whether the client had lost its state of the mode
    received: tuple[float, float] | None = None  # loss and gradient norm of the received model


def validate_reply(
    message: Message,
    visit: Visit,
    algorithm: Algorithm,
    reference: Tree,
    buffers: Tensor,
    uniform_draw: Tensor,
    examples: int,
    limits: Limits,
    buffer_rules: BufferRules | None = None,
) -> ValidReply:
    """Returns the reply in a message; raises UnreadableError with the reason if it is invalid.

    Args:
        visit: the visit that was sent to the client.
        reference: upload of a client with zero gradient, per mode, [K, P].
        buffers: running statistics per mode, [K, R].
        uniform_draw: the round's shared random draw per mode, [K, 1].
        examples: number of examples with which the client was enrolled.
        buffer_rules: constraints on the entries of `buffers`.
    """
    content, mode = message.content, visit.mode
    check_records(content)
    for name, expected_value, value in zip(Visit._fields, visit, read_visit(content), strict=True):
        if expected_value != value:
            raise UnreadableError(f"it replies for {name} {value}, where {expected_value} was sent")
    claimed = read_metric(content, "examples", int)
    if claimed != examples:
        raise UnreadableError(f"it claims {claimed} examples, and was enrolled with {examples}")
    mode_reference, travelling = (
        select_rows(reference, mode),
        algorithm.sent_buffers(buffers[mode]),
    )
    expected = {
        **algorithm.encode(mode_reference, uniform_draw[mode]),
        **({BUFFERS: travelling} if len(travelling) else {}),
    }
    received = unpack(content, UPLOAD, expected)
    buffer_change = algorithm.whole_buffers(
        received.get(BUFFERS, torch.zeros_like(travelling)), change=True
    )
    try:
        uploads = algorithm.decode(
            {name: value for name, value in received.items() if name != BUFFERS},
            mode_reference,
            uniform_draw[mode],
        )
    except Exception as error:  # untrusted bytes can make a decoder raise anything
        raise UnreadableError(f"its encoding cannot be read: {error}") from None
    for name, value in uploads.items():
        _check_change(name, value, value - mode_reference[name], limits.max_value)
    _check_change(BUFFERS, buffer_change, buffer_change, limits.max_value)
    if buffer_rules is not None:
        buffer_rules.check_change(buffers[mode], buffer_change)
    return ValidReply(
        uploads={
            name: _clip(value, mode_reference[name], limits.clip) for name, value in uploads.items()
        },
        buffers=_clip(buffer_change, torch.zeros_like(buffer_change), limits.clip),
        loss=_read_loss(content, buffers.dtype, limits),
        bytes_up=payload_bytes(received),
        state_lost=read_metric(content, "forgot", int) == 1,
        received=_read_report(content, buffers.dtype, limits) if visit.report else None,
    )


def _check_change(name: str, value: Tensor, change: Tensor, max_value: float) -> None:
    """Raises UnreadableError if values are not finite, or change by more than `max_value`.

    The limit is on the change and not on the value, because the uploads of honest clients are large
    once the model's values are large.
    """
    if not bool(value.isfinite().all()):
        raise UnreadableError(f"'{name}' has values that are not finite")
    if change.numel() and not float(change.abs().max()) <= max_value:
        raise UnreadableError(
            f"'{name}' has values that change by up to {float(change.abs().max()):.3g}, "
            f"above {max_value:g}"
        )


def _read_report(content: RecordDict, dtype: torch.dtype, limits: Limits) -> tuple[float, float]:
    """Returns loss and gradient norm of the received model, within the limits of a loss."""
    loss, norm = (read_metric(content, name, float) for name in REPORTS)
    for name, value, least in zip(REPORTS, (loss, norm), (limits.min_loss, 0.0), strict=True):
        finite = bool(torch.tensor(value, dtype=dtype).isfinite())
        if not finite or not least <= value <= limits.max_loss:
            raise UnreadableError(
                f"its '{name}' is {value:.3g}, and {least:g} to {limits.max_loss:g} is plausible"
            )
    return loss, norm


def _read_loss(content: RecordDict, dtype: torch.dtype, limits: Limits) -> float:
    """Returns a client's loss; raises UnreadableError if it is not finite or out of range.

    The loss is checked in the run's dtype: 1e39 is a finite Python float but infinite in float32.
    """
    loss = read_metric(content, "loss", float)
    if not bool(torch.tensor(loss, dtype=dtype).isfinite()):
        step = read_metric(content, "first_bad_step", int) + 1
        raise UnreadableError(f"its loss is {loss}, first in local step {step}")
    if not limits.min_loss <= loss <= limits.max_loss:
        raise UnreadableError(
            f"its loss is {loss:.3g}, and {limits.min_loss:g} to {limits.max_loss:g} is plausible"
        )
    return float(loss)


def _clip(value: Tensor, reference: Tensor, clip: float | None) -> Tensor:
    """Returns the tensor moved towards `reference` so that their distance is at most `clip`.

    Tensors with one entry are flags or counters, not updates: scaling would change their meaning.
    """
    if clip is None or value.shape[-1] == 1:
        return value
    length = float((value - reference).norm())
    return value if length <= clip else reference + (value - reference) * (clip / length)
