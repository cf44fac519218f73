"""Stochastic weight averaging: the plain mean of the models after round `start`.

Reference: Izmailov, Podoprikhin, Garipov, Vetrov, Wilson, "Averaging weights leads to wider optima
and better generalization", UAI 2018.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.average import averages
from .periodic import PeriodicMean


@averages.register("swa")
@dataclass(frozen=True, kw_only=True)
class SWA(PeriodicMean):
    """Stochastic weight averaging: the plain mean of a mode's models after round `start`.

    Until the first model is collected, the current modes predict.

    Args:
        start: number of rounds at the beginning whose models are not collected. The default is half
            of the default number of rounds; the paper of SWA averages the last quarter.
    """

    start: int = 50
