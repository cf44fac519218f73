"""How well a score separates inputs that are unlike the training data from those that are like."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .. import prng
from ..errors import InputError

RECALL = 0.95  # of FPR95


def detection_metrics(score_in: Tensor, score_out: Tensor) -> dict[str, float]:
    """AUROC, AUPR of both groups, and the false positive rate at 95 % recall.

    Inputs out of distribution are the positive class, as in OpenOOD; for "aupr_in", those in
    distribution are. AUPR is the average precision, without interpolation. FPR95 is the share of
    inputs in distribution with a score at or above the largest threshold that finds 95 % of the
    others.

    Args:
        score_in: of inputs in distribution, [n]; the higher, the more unusual.
        score_out: of inputs out of distribution, [m].
    """
    # Imported here because it takes half a second.
    from sklearn.metrics import average_precision_score, roc_auc_score

    inside, outside = (
        score.double().reshape(-1).numpy(force=True) for score in (score_in, score_out)
    )
    for scores, name in ((inside, "in"), (outside, "out of")):
        if not len(scores):
            raise InputError(f"Detection needs at least one input {name} distribution; got none.")
        if not np.isfinite(scores).all():
            raise InputError(f"Scores of inputs {name} distribution contain nan or infinity.")
    positive = np.repeat([0, 1], [len(inside), len(outside)])
    scores = np.concatenate([inside, outside])
    # The share of scores at or above this order statistic is the first that reaches the recall.
    needed = int(np.ceil(RECALL * len(outside) - 1e-9))
    threshold = np.sort(outside)[len(outside) - needed]
    return {
        "auroc": float(roc_auc_score(positive, scores)),
        "aupr_in": float(average_precision_score(1 - positive, -scores)),
        "aupr_out": float(average_precision_score(positive, scores)),
        "fpr95": float((inside >= threshold).mean()),
    }


def shuffle_features(x: Tensor, seed: int) -> Tensor:
    """Inputs out of distribution that need no other data: each feature shuffled over the rows.

    Each feature (column, pixel, or position of a sequence) keeps its values, and all that connects
    features is lost.

    Args:
        x: inputs in distribution, [n, ...].
        seed: of the permutations.

    >>> shuffle_features(torch.tensor([[1, 4], [2, 5], [3, 6]]), seed=0).sum(0).tolist()
    [6, 15]
    """
    flat = x.reshape(len(x), -1)
    keys = prng.fold_in(prng.key(seed, "shuffled features"), torch.arange(flat.shape[1]))
    order = prng.permutation(keys, len(x)).T.to(flat.device)
    return flat.gather(0, order).reshape(x.shape)
