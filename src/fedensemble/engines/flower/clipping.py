"""Clipping of client updates, relative to the median length of all clients' updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...flat_params import Tree, select_rows
from .messages import BUFFERS, Visit
from .reply_validation import ValidReply

WINDOW = 32  # lengths in the median; a round with more replies uses only its own
MIN_LENGTHS = 3  # with fewer nonzero lengths there is no median


class ClippedReplies(NamedTuple):
    """Replies of a round after clipping."""

    replies: dict[Visit, ValidReply]
    rejected: dict[Visit, str]  # with the reason
    clipped: dict[Visit, float]  # factor by which the longest tensor was shortened
    recent_lengths: Tensor  # for the next round, [<= WINDOW, T]


def limit_lengths(
    replies: Mapping[Visit, ValidReply],
    reference: Tree,
    recent_lengths: Tensor,
    clip_factor: float | None,
    reject_factor: float | None,
) -> ClippedReplies:
    """Clips updates longer than `clip_factor` medians, rejects those above `reject_factor`.

    The median is over the round's replies of all modes, because a mode often has only two clients
    and the lengths of different modes are similar. A small round is filled up with lengths of
    earlier rounds. Lengths of exactly zero are left out: a tensor that most clients do not change
    would otherwise have the median 0, which allows no change at all. Each tensor has its own
    median. Replies within the limits are returned unchanged, bit for bit.

    Args:
        replies: replies ordered by client, so that a run is reproducible.
        reference: upload of a client with zero gradient, per mode, [K, P].
        recent_lengths: lengths of earlier replies, newest first, [<= WINDOW, T].
        clip_factor, reject_factor: multiples of the median, or None for no limit.
    """
    if not replies:
        return ClippedReplies({}, {}, {}, recent_lengths)
    names = [*sorted(next(iter(replies.values())).uploads), BUFFERS]
    lengths = torch.tensor(
        [_measure_lengths(reply, visit, reference, names) for visit, reply in replies.items()],
        dtype=torch.float64,
    )
    pool = lengths
    if recent_lengths.shape[-1] == len(names):
        pool = torch.cat([lengths, recent_lengths])
    pool = pool[: max(len(lengths), WINDOW)]
    median = torch.tensor([_median(column) for column in pool.unbind(1)], dtype=torch.float64)
    ratio = (lengths / median).nan_to_num(0.0)  # [J, T]; 0 where there is no median
    # Tensors with one entry are flags or counters, not updates: scaling would change their meaning.
    # They can be rejected but are never clipped.
    can_clip = torch.tensor([name == BUFFERS or reference[name].shape[-1] > 1 for name in names])
    accepted = dict[Visit, ValidReply]()
    rejected, clipped = dict[Visit, str](), dict[Visit, float]()
    for (visit, reply), ratios in zip(replies.items(), ratio, strict=True):
        largest, largest_clippable = float(ratios.max()), float(ratios[can_clip].max())
        if reject_factor is not None and largest > reject_factor:
            name = names[int(ratios.argmax())]
            rejected[visit] = (
                f"'{name}' changes {largest:.3g} times as much as the median client's; "
                f"refuse-factor is {reject_factor:g}"
            )
        elif clip_factor is not None and largest_clippable > clip_factor:
            ratio_by_name = dict(zip(names, ratios.tolist(), strict=True))
            accepted[visit] = _clip_reply(
                reply, select_rows(reference, visit.mode), ratio_by_name, clip_factor
            )
            clipped[visit] = round(largest_clippable / clip_factor, 4)
        else:
            accepted[visit] = reply
    return ClippedReplies(accepted, rejected, clipped, pool[:WINDOW])


def _measure_lengths(
    reply: ValidReply, visit: Visit, reference: Tree, names: Sequence[str]
) -> list[float]:
    """Returns each tensor's distance from the upload of a client with zero gradient."""
    changes = {name: value - reference[name][visit.mode] for name, value in reply.uploads.items()}
    return [float(changes.get(name, reply.buffers).double().norm()) for name in names]


def _median(lengths: Tensor) -> float:
    """Returns the lower median of the nonzero lengths; nan if there are too few."""
    nonzero = lengths[lengths > 0]
    return float(nonzero.median()) if len(nonzero) >= MIN_LENGTHS else float("nan")


def _clip_reply(
    reply: ValidReply, reference: Tree, ratio: Mapping[str, float], clip_factor: float
) -> ValidReply:
    """Returns a reply with tensors of at most `clip_factor` medians; single values are kept."""
    uploads = {
        name: reference[name] + (value - reference[name]) * (clip_factor / ratio[name])
        if ratio[name] > clip_factor and value.shape[-1] > 1
        else value
        for name, value in reply.uploads.items()
    }
    buffers = reply.buffers
    if ratio[BUFFERS] > clip_factor:
        buffers = buffers * (clip_factor / ratio[BUFFERS])
    return replace(reply, uploads=uploads, buffers=buffers)
