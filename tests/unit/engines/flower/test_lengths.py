"""Limits on lengths and texts, for any answers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr")

from fedensemble.engines.flower.clipping import WINDOW, limit_lengths
from fedensemble.engines.flower.messages import Visit
from fedensemble.engines.flower.reply_validation import ValidReply
from fedensemble.engines.flower.weight_limits import cap_weights, find_dominant
from fedensemble.text import shorten

LENGTHS = st.lists(
    st.sampled_from([0.0, 1e-8, 0.5, 1.0, 1.2, 2.0, 7.0, 40.0, 1e6]), min_size=1, max_size=40
)


def answers_of(lengths, still):
    """Answers whose only tensor is so far from that of a client that learned nothing."""
    made = {}
    for client, length in enumerate(lengths):
        change = torch.zeros(still.shape[-1], dtype=torch.float64)
        change[client % len(change)] = length
        visit = Visit("t", 0, client, client % 2, -1, 1)
        made[visit] = ValidReply(
            {"theta": still[visit.mode] + change},
            torch.zeros(0, dtype=torch.float64),
            1.0,
            8,
            False,
        )
    return made


@given(LENGTHS, LENGTHS, st.floats(1.0, 5.0), st.floats(5.0, 30.0))
@settings(deadline=None, max_examples=100)
def test_lengths_are_limited_by_the_median_and_nothing_else_changes(lengths, earlier, clip, refuse):
    still = torch.arange(6, dtype=torch.float64).reshape(2, 3)
    answers = answers_of(lengths, still)
    recent = torch.tensor([[length, 0.0] for length in earlier[:WINDOW]], dtype=torch.float64)
    found = limit_lengths(answers, {"theta": still}, recent, clip, refuse)
    pool = [length for length in (lengths + earlier)[: max(len(lengths), WINDOW)] if length > 0]
    median = sorted(pool)[(len(pool) - 1) // 2] if len(pool) >= 3 else math.inf
    for (visit, answer), length in zip(answers.items(), lengths, strict=True):
        if length > refuse * median * (1 + 1e-9):
            assert visit in found.rejected and visit not in found.replies
        elif length < refuse * median * (1 - 1e-9):
            change = found.replies[visit].uploads["theta"] - still[visit.mode]
            assert float(change.norm()) == pytest.approx(
                min(length, clip * median), rel=1e-6, abs=1e-9
            )
            if length < clip * median * (1 - 1e-6):
                assert found.replies[visit] is answer
    assert (
        set(found.replies) | set(found.rejected) == set(answers)
        and len(found.recent_lengths) <= WINDOW
    )
    assert found.recent_lengths[: len(lengths), 0].tolist() == pytest.approx(
        lengths[:WINDOW], abs=1e-9
    )


def test_single_numbers_are_refused_or_taken_but_never_shortened():
    """A flag of 0.3 would mean something else than one of 1."""
    still = {
        "theta": torch.zeros(1, 3, dtype=torch.float64),
        "flag": torch.zeros(1, 1, dtype=torch.float64),
    }
    flags = [1.0, 1.0, 1.0, 0.0, 5.0, 1e5]
    answers = {
        Visit("t", 0, client, 0, -1, 1): ValidReply(
            {"theta": torch.ones(3).double(), "flag": torch.tensor([flag]).double()},
            torch.zeros(0),
            1.0,
            8,
            False,
        )
        for client, flag in enumerate(flags)
    }
    found = limit_lengths(answers, still, torch.empty(0, 0, dtype=torch.float64), 3.0, 15.0)
    assert [float(answer.uploads["flag"]) for answer in found.replies.values()] == flags[:5]
    assert [visit.client for visit in found.rejected] == [5] and not found.clipped


@given(st.text(max_size=500), st.integers(3, 300))
@settings(deadline=None, max_examples=100)
def test_printable_texts_are_short_and_have_no_control_characters(text, longest):
    made = shorten(text, longest)
    assert len(made) <= longest and made.isprintable()
    assert made == text or not text.isprintable() or len(text) > longest


@given(st.lists(st.integers(1, 10**7), min_size=1, max_size=30), st.floats(1.0, 10.0))
@settings(deadline=None, max_examples=100)
def test_weights_are_examples_up_to_the_limit(sizes, most):
    weights = cap_weights(torch.tensor(sizes), most)
    limit = most * sorted(sizes)[(len(sizes) - 1) // 2]
    assert weights.tolist() == pytest.approx([min(size, limit) for size in sizes])
    assert cap_weights(torch.tensor(sizes), None).tolist() == sizes
    shares = find_dominant(torch.zeros(len(sizes), dtype=torch.int64), weights)
    assert all(share >= 0.5 for share in shares.values()) and len(shares) <= 1
