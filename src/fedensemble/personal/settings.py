"""The settings of `personalize`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..arguments import require_integer
from ..core.optimizer import SGD, Optimizer, optimizers
from ..errors import InputError
from ..text import shorten

Method = Literal["select", "mix", "tune", "head", "posterior"]
METHODS: tuple[str, ...] = get_args(Method)
TRAINING = ("tune", "head")  # methods that train on the client


@dataclass(frozen=True, kw_only=True)
class PersonalSettings:
    """How a client makes a model of its own from K modes.

    Args:
        method: "select", "mix", "posterior", "tune" or "head"; see `personalize`.
        steps: local steps of "tune" and "head".
        lr: learning rate of these steps; None takes that of the algorithm in its last round.
        optimizer: of these steps: an Optimizer such as `Adam()`, a registered name, or a dict with
            the name and options. It starts fresh.
        batch_size: of these steps; None takes that of the training.
        head: patterns of the names of the parameters that "head" trains, such as ["head.*"].
        prior: of "mix": number of imagined rows that speak for equal weights.
    """

    method: str = "select"
    steps: int = 20
    lr: float | None = None
    optimizer: Optimizer | str | Mapping[str, Any] = SGD()  # noqa: RUF009 (frozen)
    batch_size: int | None = None
    head: Sequence[str] | None = None
    prior: float = 1.0

    def __post_init__(self) -> None:
        who = "personalize()"
        if self.method not in METHODS:
            raise InputError(f"{who} needs method {', '.join(METHODS)}; got {self.method!r}.")
        require_integer(who, "steps", self.steps, minimum=1)
        if self.batch_size is not None:
            require_integer(who, "batch_size", self.batch_size, minimum=1)
        for name, lowest in (("lr", 0.0), ("prior", 0.0)):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise InputError(f"{who} needs a number for {name}; got {value!r}.")
            if not (math.isfinite(value) and (value > lowest or (name == "prior" and value == 0))):
                bound = ">= 0" if name == "prior" else "> 0"
                raise InputError(f"{who} needs {name} {bound}; got {value}.")
        object.__setattr__(self, "optimizer", optimizers.build(self.optimizer))
        if not isinstance(self.optimizer, Optimizer):
            raise InputError(
                f"{who} needs an optimizer such as 'adam', SGD() or Adam(); got {self.optimizer!r}."
            )
        if isinstance(self.head, str):
            raise InputError(f"{who}: head is a list of patterns; write [{shorten(self.head)!r}].")
        if (self.method == "head") != bool(self.head):
            raise InputError(
                f"{who}: method 'head' needs head=['head.*'], patterns of the names of the "
                "parameters to train, and other methods take no such patterns; got method "
                f"{self.method!r} and head={self.head!r}."
            )
