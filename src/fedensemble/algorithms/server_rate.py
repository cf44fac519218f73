"""The learning rate of the server's own step, and its decay over rounds."""

from dataclasses import dataclass

from ..core.algorithm import Algorithm
from ..core.types import Cohort
from ..errors import InputError


@dataclass(frozen=True, kw_only=True)
class ServerRate(Algorithm):
    """An algorithm whose server has a learning rate, which may decay.

    Decay of the clients' learning rate (`lr_decay`) has little effect on adaptive server
    optimizers, because they normalize the mean change. The decay counts the rounds of the run, for
    every mode: a mode that was idle for some rounds continues with the rate of the current round.

    Args:
        server_lr: learning rate of the server.
        server_lr_decay: factor applied to it every `server_lr_decay_every` rounds; 1 is constant.
        server_lr_decay_every: number of rounds between two decays.
    """

    server_lr: float = 1.0
    server_lr_decay: float = 1.0
    server_lr_decay_every: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        owner = type(self).__name__
        if not self.server_lr > 0:
            raise InputError(f"{owner} needs server_lr > 0; got {self.server_lr}.")
        if not 0 < self.server_lr_decay <= 1 or self.server_lr_decay_every < 1:
            raise InputError(
                f"{owner} needs 0 < server_lr_decay <= 1 and server_lr_decay_every >= 1; "
                f"got {self.server_lr_decay} and {self.server_lr_decay_every}."
            )

    def server_rate(self, cohort: Cohort) -> float:
        """The server's learning rate in the cohort's round.

        >>> import torch
        >>> from fedensemble import FedAdam
        >>> one = torch.ones(1, 1)
        >>> cohort = Cohort(one, one, one, 9, one, round=20)
        >>> FedAdam(server_lr=0.1, server_lr_decay=0.5).server_rate(cohort)
        0.025
        """
        return self.server_lr * self.server_lr_decay ** (cohort.round // self.server_lr_decay_every)
