"""Models sampled from a distribution fitted to a mode's clients, [K, S, P].

Gaussian: N(mean, diag(sum_i p_i (w_i - mean)^2)).   Dirichlet: sum_i g_i p_i w_i / sum_i g_i p_i
with g ~ Dir(alpha).

Reference: Chen, Chao, "FedBE: making Bayesian model ensemble applicable to federated learning",
ICLR 2021, section 4.1.
"""

import torch
from torch import Tensor

from .. import prng
from ..core.types import Members

_SMALLEST = 1e-100  # of a gamma variate: with a small alpha all of them can underflow to 0


def gaussian(mean: Tensor, members: Members, key: Tensor, samples: int, scale: float) -> Tensor:
    """Samples of a normal distribution with the clients' mean [K, P] and `scale` times their
    standard deviation.
    """
    theta = members.uploads["theta"]
    shares = members.shares(len(mean)).to(mean.dtype)
    spread = scale * torch.sqrt(shares @ (theta - mean[members.mode]) ** 2)
    noise = (
        prng.normal(prng.fold(key, sample), mean.shape[-1]).to(mean.dtype)
        for sample in range(samples)
    )
    return torch.stack([mean + spread * one for one in noise], 1)


def dirichlet(mean: Tensor, members: Members, key: Tensor, samples: int, alpha: float) -> Tensor:
    """Averages of the clients' models with random weights about the usual ones."""
    from scipy.special import gammaincinv  # here: it takes long to load, and few methods need it

    uniform = prng.uniform(prng.fold(key.unsqueeze(1), members.client), samples).cpu()  # [K, J, S]
    gamma = (
        torch.as_tensor(gammaincinv(alpha, uniform.numpy())).clamp(min=_SMALLEST).to(mean.device)
    )
    weight = members.shares(len(mean)).double().unsqueeze(-1) * gamma
    weight = weight / weight.sum(1, keepdim=True).clamp(min=_SMALLEST**2)
    return weight.mT.to(mean.dtype) @ members.uploads["theta"]
