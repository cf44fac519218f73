"""Attacks in which malicious clients train correctly, but upload something else.

References: Bagdasaryan, Veit, Hua, Estrin, Shmatikov, "How to backdoor federated learning", AISTATS
2020 (scaling); Baruch, Baruch, Goldberg, "A little is enough: circumventing defenses for
distributed learning", NeurIPS 2019 (ALIE); Xie, Koyejo, Gupta, "Fall of empires: breaking
Byzantine-tolerant SGD by inner product manipulation", UAI 2019 (IPM).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import prng
from ..core.attack import Attack, attacks
from .options import check_positive


@attacks.register("sign-flip")
@dataclass(frozen=True, kw_only=True)
class SignFlip(Attack):
    """Malicious clients upload the negative of the change that they trained.

    Args:
        factor: factor on the negative change.
    """

    factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "factor")

    def forge(self, own: Tensor, honest: Tensor, key: Tensor) -> Tensor:
        return -self.factor * own


@attacks.register("scaling")
@dataclass(frozen=True, kw_only=True)
class Scaling(Attack):
    """Malicious clients upload a multiple of the change that they trained.

    Args:
        factor: factor on the change.
    """

    factor: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "factor")

    def forge(self, own: Tensor, honest: Tensor, key: Tensor) -> Tensor:
        return self.factor * own


@attacks.register("noise")
@dataclass(frozen=True, kw_only=True)
class Noise(Attack):
    """Malicious clients add Gaussian noise to the change that they trained.

    Args:
        factor: standard deviation of the noise, in units of the change's root mean square.
    """

    factor: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "factor")

    def forge(self, own: Tensor, honest: Tensor, key: Tensor) -> Tensor:
        scale = (
            own.square().mean(1, keepdim=True).sqrt()
            if own.shape[1]
            else own.new_zeros(len(own), 1)
        )
        return own + self.factor * scale * prng.normal(key, own.shape[1]).to(own.dtype)


@attacks.register("alie")
@dataclass(frozen=True, kw_only=True)
class ALIE(Attack):
    """A little is enough: malicious clients upload the honest mean minus z standard deviations.

    They know the uploads of their mode's honest clients, and hide in the spread of each coordinate.

    Args:
        z: number of standard deviations; None uses the paper's value, the largest for which enough
            honest clients are still further away from the mean.
    """

    z: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.z is not None:
            check_positive(self, "z")

    def forge(self, own: Tensor, honest: Tensor, key: Tensor) -> Tensor:
        z = alie_z(len(own) + len(honest), len(own)) if self.z is None else self.z
        mean = honest.mean(0)
        spread = (honest - mean).square().mean(0).sqrt()
        return (mean - z * spread).expand_as(own)


@attacks.register("ipm")
@dataclass(frozen=True, kw_only=True)
class IPM(Attack):
    """Inner product manipulation: malicious clients upload the negative of the honest mean.

    They know the uploads of their mode's honest clients.

    Args:
        epsilon: factor on the negative mean.
    """

    epsilon: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "epsilon")

    def forge(self, own: Tensor, honest: Tensor, key: Tensor) -> Tensor:
        return (-self.epsilon * honest.mean(0)).expand_as(own)


def alie_z(clients: int, malicious: int) -> float:
    """The z of the ALIE paper for n clients, m of them malicious.

    Phi(z) = (n - m - s) / (n - m), with s = floor(n / 2 + 1) - m.

    >>> round(alie_z(50, 24), 2)
    1.43
    """
    honest = clients - malicious
    supporters = clients // 2 + 1 - malicious
    share = (honest - supporters) / honest if honest else 0.0
    # If malicious clients have the majority, any z works; the bound keeps z finite.
    highest = 1 - 0.5 / max(honest, 1)
    probability = torch.tensor(min(max(share, 0.5), highest), dtype=torch.float64)
    return float(torch.special.ndtri(probability))
