"""Scores of uncertainty per input; the higher, the less certain."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Score = Literal["entropy", "mutual_information", "max_probability", "energy", "variation_ratio"]
SCORES: tuple[Score, ...] = (
    "max_probability",
    "entropy",
    "mutual_information",
    "energy",
    "variation_ratio",
)


# The largest sum of a Dirichlet distribution's concentrations. With more, its draws differ from its
# mean by less than the rounding of float32, and the difference of two digammas would be noise.
MAX_TOTAL = 1e6


def variation_ratio(members: Tensor) -> Tensor:
    """Share of members whose label is not the most frequent one, [B, ...].

    Args:
        members: class probabilities of each member, [K, B, ..., C].

    >>> variation_ratio(torch.tensor([[[0.9, 0.1]], [[0.8, 0.2]], [[0.2, 0.8]]])).tolist()
    [0.3333333432674408]
    """
    labels = members.argmax(-1)
    return (labels != labels.mode(0).values).to(members.dtype).mean(0)


def ensemble_energy(members: Tensor, member_energy: Tensor, *, by_logits: bool) -> Tensor:
    """Energy of the ensemble, [B, ...]: -log sum_c exp(logit_c) (Liu et al. 2020).

    An ensemble that averages logits has logits, and their energy is returned. One that averages
    probabilities has none: softmax removes the constant that is the energy, and it cannot be
    recovered from the mean. The mean of the members' energies is returned then. Both are equal for
    one member.

    Args:
        members: class probabilities of each member, [K, B, ..., C].
        member_energy: of the logits of each member, [K, B, ...].
        by_logits: whether the ensemble averages logits.
    """
    if not by_logits:
        return member_energy.mean(0)
    # The logits are the log-probabilities plus a constant, the negative energy.
    log_probabilities = members.clamp(min=torch.finfo(members.dtype).tiny).log()
    return -(log_probabilities - member_energy.unsqueeze(-1)).mean(0).logsumexp(-1)


def entropy(probabilities: Tensor) -> Tensor:
    """Entropy over the last dimension, in nats."""
    terms: Tensor = torch.special.xlogy(probabilities, probabilities)
    return -terms.sum(-1)


def expected_entropy(members: Tensor, member_energy: Tensor) -> Tensor:
    """Expected entropy of the class probabilities that a Dirichlet distribution draws, [K, B, ...].

    With concentrations alpha_c and their sum alpha_0, the mean is p_c = alpha_c / alpha_0 and the
    expected entropy sum_c p_c (digamma(alpha_0 + 1) - digamma(alpha_c + 1)).

    Args:
        members: the mean of each member's distribution, [K, B, ..., C].
        member_energy: -log alpha_0 of each member, [K, B, ...].

    >>> expected_entropy(torch.tensor([[[0.5, 0.5]]]), torch.tensor([[-math.log(2)]])).tolist()
    [[0.5]]
    """
    total = concentration(member_energy).unsqueeze(-1)
    terms = members * (torch.digamma(total + 1) - torch.digamma(members * total + 1))
    return terms.sum(-1)


def concentration(member_energy: Tensor) -> Tensor:
    """alpha_0 of Dirichlet distributions whose logits have these energies, at most `MAX_TOTAL`."""
    return (-member_energy).clamp(max=math.log(MAX_TOTAL)).exp()


def mutual_information(members: Tensor, member_entropy: Tensor | None = None) -> Tensor:
    """Entropy of the mean minus mean entropy of the members, [B, ...]; >= 0.

    Args:
        members: class probabilities of each member, [K, B, ..., C].
        member_entropy: the mean entropy of the members, [B, ...]; None to compute it.
    """
    if member_entropy is None:
        member_entropy = entropy(members).mean(0)
    return (entropy(members.mean(0)) - member_entropy).clamp(min=0)


def probability_score(score: str, mean: Tensor, members: Tensor) -> Tensor:
    """A score that is a function of probabilities, which are all but the energy, [B, ...].

    Args:
        score: name of the score.
        mean: combined probabilities, [B, ..., C].
        members: of each member, [K, B, ..., C].
    """
    if score == "max_probability":
        return 1 - mean.amax(-1)
    if score == "variation_ratio":
        return variation_ratio(members)
    return entropy(mean) if score == "entropy" else mutual_information(members)


def score_range(score: str, classes: int) -> float:
    """The upper end of the range of a score; the lower end is 0."""
    return math.log(classes) if score in ("entropy", "mutual_information") else 1.0
