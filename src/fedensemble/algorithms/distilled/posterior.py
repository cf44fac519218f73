"""Samples [K, S, P] of a distribution over models that is fitted to the clients of each mode.

Gaussian:   N(mean, diag(sum_i p_i (w_i - mean)^2)).
Dirichlet:  sum_i g_i p_i w_i / sum_i g_i p_i with g ~ Dir(alpha).

Reference: Chen, Chao, "FedBE: making Bayesian model ensemble applicable to federated learning",
ICLR 2021, section 4.1.
"""

import torch
from torch import Tensor

from ... import prng
from ...core.types import GatheredUploads

# Lower bound of gamma variates. With a small alpha all of them can underflow to 0, and the weights
# would be 0 / 0.
_SMALLEST_GAMMA = 1e-100


def sample_gaussian(
    mean: Tensor, members: GatheredUploads, key: Tensor, samples: int, scale: float
) -> Tensor:
    """Normal samples with the clients' mean [K, P] and `scale` times their standard deviation."""
    theta = members.uploads["theta"]
    shares = members.shares(len(mean)).to(mean.dtype)
    spread = scale * torch.sqrt(shares @ (theta - mean[members.mode]) ** 2)
    noises = (
        prng.normal(prng.fold_in(key, sample), mean.shape[-1]).to(mean.dtype)
        for sample in range(samples)
    )
    return torch.stack([mean + spread * noise for noise in noises], 1)


def sample_dirichlet(
    mean: Tensor, members: GatheredUploads, key: Tensor, samples: int, alpha: float
) -> Tensor:
    """Averages of the clients' models with random weights around their usual weights."""
    from scipy.special import gammaincinv  # imported here: slow to load, and rarely needed

    # Normalized gamma variates are Dirichlet distributed. The inverse CDF turns keyed uniform
    # numbers into gamma variates, so that samples do not depend on a generator's state.
    uniform = prng.uniform(
        prng.fold_in(key.unsqueeze(1), members.client), samples
    ).cpu()  # [K, J, S]
    gamma = torch.as_tensor(gammaincinv(alpha, uniform.numpy())).clamp(min=_SMALLEST_GAMMA)
    weight = members.shares(len(mean)).double().unsqueeze(-1) * gamma.to(mean.device)
    weight = weight / weight.sum(1, keepdim=True).clamp(min=_SMALLEST_GAMMA**2)
    return weight.mT.to(mean.dtype) @ members.uploads["theta"]
