"""log p(w | D) of trained modes, for their reading as variational inference.

For a regression with Gaussian noise s and the prior N(a, 1 / alpha) of the weights,

    log p(w | D) = -sum_j |f_w(x_j) - y_j|^2 / (2 s^2) - alpha / 2 |w - a|^2
                   - n / 2 log(2 pi s^2) + P / 2 log(alpha / (2 pi)) - log p(D),

and the evidence p(D) is left out: it is the same for all modes. For classification the first term
is the log-likelihood of the labels. The K modes are read as the distribution q(w) = 1/K sum_k
delta(w - w_k); modes that minimise the regularised loss maximise E_q log p(w | D).
"""

from __future__ import annotations

from math import log, pi

import torch
from torch import Tensor

from ..data.federated import FederatedData
from ..errors import InputError
from ..predict import Ensemble


def log_posterior(
    ensemble: Ensemble,
    data: FederatedData,
    *,
    prior_precision: float,
    noise: float = 1.0,
    anchors: Tensor | None = None,
) -> Tensor:
    """Log p(w_k | D) + log p(D) of each mode on the clients' data, float64 [K].

    Args:
        ensemble: the K modes.
        data: the clients' examples; regression, or classification with integer labels.
        prior_precision: alpha. The prior covers the parameters, not the buffers.
        noise: standard deviation s of regression targets.
        anchors: means a of the priors, [K, P]; zero by default.
    """
    if not prior_precision > 0 or not noise > 0:
        raise InputError(
            f"log_posterior() needs prior_precision > 0 and noise > 0; got {prior_precision} and "
            f"{noise}."
        )
    predicted = ensemble.predict(data.x).modes.double().cpu()
    targets = data.y.cpu()
    if ensemble.model.task == "regression":
        residual = (predicted.reshape(len(predicted), -1) - targets.double().flatten()) / noise
        fit = -(residual**2 + log(2 * pi * noise**2)).sum(1) / 2
    else:
        index = targets.long().unsqueeze(-1).expand(len(predicted), *targets.shape, 1)
        smallest = torch.finfo(predicted.dtype).tiny
        fit = predicted.gather(-1, index).clamp(min=smallest).log().flatten(1).sum(1)
    weights = ensemble.theta.double().cpu()
    away = weights if anchors is None else weights - anchors.double().cpu()
    prior: Tensor = -prior_precision / 2 * away.square().sum(1)
    return fit + prior + weights.shape[1] / 2 * log(prior_precision / (2 * pi))
