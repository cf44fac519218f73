"""Temperature scaling by sums over rows, which clients can send instead of their rows.

A temperature T divides logits: T > 1 makes probabilities less confident. The best T minimizes the
negative log-likelihood (NLL). Every client sends the sums of its rows' NLL and of its first two
derivatives at a few fixed temperatures, and the server interpolates the total between them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InputError

# Logarithms of temperatures at which clients evaluate their rows: T from 0.14 to 20. Two
# derivatives at this spacing determine the best temperature to about 1e-6, in one exchange.
LOG_TEMPERATURES = torch.arange(-8, 13, dtype=torch.double) / 4
SUMS = 3  # NLL, first and second derivative


def temperature_sums(logits: Tensor, target: Tensor) -> Tensor:
    """Sums over rows of the NLL and its derivatives by log T at LOG_TEMPERATURES, [21, 3].

    Args:
        logits: [n, C]; log-probabilities are logits, too.
        target: labels, [n].
    """
    logits = logits.reshape(len(target), logits.shape[-1]).double()
    # The largest logit is 0, so that no temperature makes an exponential overflow.
    logits = logits - logits.amax(-1, keepdim=True)
    index = target.long().unsqueeze(1)
    rows = []
    for log_temperature in LOG_TEMPERATURES.tolist():
        scaled = logits * torch.exp(torch.tensor(-log_temperature, dtype=torch.double))
        log_p = scaled.log_softmax(-1)
        p = log_p.exp()
        mean = (p * scaled).sum(-1)
        variance = (p * scaled.square()).sum(-1) - mean.square()
        # With z = logits / T: d NLL / d log T = z[target] - E z, and its derivative is
        # Var z - (z[target] - E z), because dz / d log T = -z.
        gradient = scaled.gather(1, index).squeeze(1) - mean
        nll = -log_p.gather(1, index).squeeze(1)
        rows.append(torch.stack([nll.sum(), gradient.sum(), (variance - gradient).sum()]))
    return torch.stack(rows)


def fit_temperature(sums: Tensor) -> tuple[float, float]:
    """The temperature that minimizes the NLL, and the NLL there.

    If no error limits the confidence, the smallest temperature of LOG_TEMPERATURES is best.

    Args:
        sums: what `temperature_sums` returned, added up over clients, [21, 3].

    >>> logits, target = torch.tensor([[4.0, 0.0]]).repeat(4, 1), torch.tensor([0, 0, 0, 1])
    >>> temperature, nll = fit_temperature(temperature_sums(logits, target))
    >>> round(temperature, 3), round(nll, 3)  # 3 of 4 are right: 4 / T = ln 3
    (3.641, 2.249)
    """
    from scipy.interpolate import BPoly
    from scipy.optimize import brentq

    if sums.shape != (len(LOG_TEMPERATURES), SUMS) or not bool(sums.isfinite().all()):
        raise InputError("fit_temperature() needs the finite sums that temperature_sums() returns.")
    grid, values = LOG_TEMPERATURES.numpy(), sums.double().cpu().numpy()
    # The NLL is convex in 1 / T, so its gradient changes its sign at most once.
    rising = values[:, 1] > 0
    curve = BPoly.from_derivatives(grid, values)
    if not values[:, 1].any():
        best = 0.0  # the same NLL at every temperature: nothing to scale
    elif rising[0] or not rising.any():
        best = grid[0] if rising[0] else grid[-1]
    else:
        after = int(rising.argmax())
        best = brentq(curve.derivative(), grid[after - 1], grid[after], xtol=1e-12)
    return float(torch.tensor(best, dtype=torch.double).exp()), float(curve(best))


def combine_members(outputs: Tensor, members: Tensor, *, by_logits: bool) -> Tensor:
    """The mean class probabilities of an ensemble, [n, ..., C].

    Args:
        outputs: logits of all models, [K, S, n, ..., C].
        members: their probabilities, the softmax of `outputs`.
        by_logits: whether logits are averaged, and not probabilities.
    """
    if by_logits:
        return torch.softmax(mean_over_samples(outputs).mean(0), dim=-1)
    return mean_over_samples(members).mean(0)


def log_mean(outputs: Tensor, *, by_logits: bool) -> Tensor:
    """Logarithm of the mean class probabilities, [n, ..., C] float64.

    Computed from logits, because the probability of a class can be 0 in floating point.
    """
    outputs = outputs.double()
    if by_logits:
        return mean_over_samples(outputs).mean(0).log_softmax(-1)
    models = outputs.shape[0] * outputs.shape[1]
    log_members: Tensor = outputs.log_softmax(-1).flatten(0, 1)
    return log_members.logsumexp(0) - torch.tensor(models).double().log()


def scale_members(outputs: Tensor, temperatures: tuple[float, ...]) -> Tensor:
    """The logits of all models divided by the temperature of their mode.

    Args:
        outputs: [K, S, n, ..., C].
        temperatures: of each mode, K.
    """
    scale = torch.tensor(temperatures, dtype=outputs.dtype, device=outputs.device)
    return outputs / scale.reshape(-1, *[1] * (outputs.dim() - 1))


def scaled_mean(outputs: Tensor, temperature: float, *, by_logits: bool) -> Tensor:
    """The mean class probabilities after temperature scaling of the mean, [n, ..., C].

    Args:
        outputs: logits of all models, [K, S, n, ..., C].
        temperature: of the mean.
        by_logits: whether the ensemble averages logits.
    """
    return (log_mean(outputs, by_logits=by_logits) / temperature).softmax(-1).to(outputs.dtype)


def mean_over_samples(values: Tensor) -> Tensor:
    """The mean over the S models of each mode, [K, S, ...] -> [K, ...]; a view if S = 1."""
    return values.mean(1) if values.shape[1] > 1 else values.squeeze(1)
