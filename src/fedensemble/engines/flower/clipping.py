"""Limits on the length of updates that adapt to the lengths of all clients' updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...flat_params import Tree, rows
from .messages import BUFFERS, Visit
from .reply_validation import Answer

WINDOW = 32  # lengths that the median is taken over; a round with more of them uses its own only
FEWEST = 3  # lengths without which there is no median to speak of


class Limited(NamedTuple):
    """The answers of a round after the limits."""

    answers: dict[Visit, Answer]
    refused: dict[Visit, str]  # with the reason
    clipped: dict[Visit, float]  # by what factor the longest tensor was shortened
    recent: Tensor  # lengths for the next round, [<= WINDOW, T]


def limit_lengths(
    answers: Mapping[Visit, Answer],
    still: Tree,
    recent: Tensor,
    clip: float | None,
    refuse: float | None,
) -> Limited:
    """Shortens updates longer than `clip` times the median length, and refuses those longer than
    `refuse` times.

    The median is over the round's answers of all modes: a mode often has two clients only, and the
    lengths of different modes are alike. Small rounds are filled up with the lengths of the rounds
    before. Lengths of exactly zero are left out, for a tensor that most clients leave alone would
    else allow no change at all. Each tensor has its own median. Answers within the limits are
    handed back untouched, to the bit.

    Args:
        answers: in the order of clients, so that a run can be repeated.
        still: what a client that learned nothing would upload for each mode, [K, P].
        recent: lengths of earlier answers, newest first, [<= WINDOW, T].
        clip, refuse: multiples of the median, or None.
    """
    if not answers:
        return Limited({}, {}, {}, recent)
    names = [*sorted(next(iter(answers.values())).uploads), BUFFERS]
    measured = [_lengths(answer, visit, still, names) for visit, answer in answers.items()]
    lengths = torch.tensor(measured, dtype=torch.float64)
    pool = torch.cat([lengths, recent]) if recent.shape[-1] == len(names) else lengths
    pool = pool[: max(len(lengths), WINDOW)]
    median = torch.tensor([_median(column) for column in pool.unbind(1)], dtype=torch.float64)
    ratio = (lengths / median).nan_to_num(0.0)  # [J, T]; 0 where there is no median
    # A single number, such as a flag or a counter, is no update: shortened, it would mean something
    # else.
    updates = torch.tensor([name == BUFFERS or still[name].shape[-1] > 1 for name in names])
    found, refused, clipped = dict[Visit, Answer](), dict[Visit, str](), dict[Visit, float]()
    for (visit, answer), own in zip(answers.items(), ratio, strict=True):
        longest, longest_update = float(own.max()), float(own[updates].max())
        if refuse is not None and longest > refuse:
            name = names[int(own.argmax())]
            refused[visit] = (
                f"'{name}' changes {longest:.3g} times as much as the median client's; refuse-factor is {refuse:g}"
            )
        elif clip is not None and longest_update > clip:
            by_name = dict(zip(names, own.tolist(), strict=True))
            found[visit] = _shortened(answer, rows(still, visit.mode), by_name, clip)
            clipped[visit] = round(longest_update / clip, 4)
        else:
            found[visit] = answer
    return Limited(found, refused, clipped, pool[:WINDOW])


def _lengths(answer: Answer, visit: Visit, still: Tree, names: Sequence[str]) -> list[float]:
    """How far each tensor of an answer is from that of a client that learned nothing."""
    changes = {name: value - still[name][visit.mode] for name, value in answer.uploads.items()}
    return [float(changes.get(name, answer.buffers).double().norm()) for name in names]


def _median(lengths: Tensor) -> float:
    """The lower median of the lengths above zero; nan if there are too few."""
    moved = lengths[lengths > 0]
    return float(moved.median()) if len(moved) >= FEWEST else float("nan")


def _shortened(answer: Answer, still: Tree, ratio: Mapping[str, float], clip: float) -> Answer:
    """An answer whose tensors are at most `clip` medians long; single numbers stay what they
    are.
    """
    uploads = {
        name: still[name] + (value - still[name]) * (clip / ratio[name])
        if ratio[name] > clip and value.shape[-1] > 1
        else value
        for name, value in answer.uploads.items()
    }
    buffers = answer.buffers * (clip / ratio[BUFFERS]) if ratio[BUFFERS] > clip else answer.buffers
    return replace(answer, uploads=uploads, buffers=buffers)
