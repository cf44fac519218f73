"""What is calibrated, and how: the arguments of `Federation.calibrate`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from ..arguments import (
    require_bool,
    require_integer,
    require_nonnegative,
    require_one_of,
)
from ..errors import InputError
from .conformal_scores import CLASS_METHODS, INTERVAL_METHODS, Method
from .conformal_threshold import BINS
from .scores import SCORES, Score

Scope = Literal["mixture", "pool", "client", "class"]
Place = Literal["mean", "member"]
_OWNER = "calibrate()"
# Share of a client's rows that fit the temperature. The others set thresholds: these would not be
# valid on rows that had a say in the probabilities.
TEMPERATURE_SHARE = 1 / 3
_MAX_CLASSES = BINS // 8  # with scope "class": the bins of a histogram are divided among classes


@dataclass(frozen=True, kw_only=True)
class CalibrationSettings:
    """What is calibrated, and how.

    Args:
        alpha: share of targets that may be outside of prediction sets or intervals.
        method: "lac", "aps" or "raps" for sets, "absolute" or "cqr" for intervals; "auto" is "lac"
            and "absolute", and "none" makes neither.
        temperature: what is divided by a temperature: the logits of the "mean" prediction, those of
            each "member", or "auto": whichever has the lower NLL; "none" for nothing.
        scope: which rows keep `alpha`. "mixture": rows that come from the clients in the same
            proportions as the calibration rows. "pool": rows of a client that is drawn at random,
            however much clients differ, which takes many rows per client. "client": those of each
            client. "class": those of each class.
        randomized: of "aps" and "raps": see `class_scores`.
        penalty, free_classes: of "raps".
        abstain: scores of uncertainty for which `Prediction.abstain` can then find a threshold
            without calibration data.
    """

    alpha: float = 0.1
    method: Literal["auto", "none"] | Method = "auto"
    temperature: Literal["auto", "none"] | Place = "auto"
    scope: Scope = "mixture"
    randomized: bool = True
    penalty: float = 0.01
    free_classes: int = 1
    abstain: tuple[Score, ...] = ("entropy",)

    def __post_init__(self) -> None:
        if not isinstance(self.alpha, float) or not 0 < self.alpha < 1:
            raise InputError(
                f"{_OWNER} needs alpha, the share of targets that may be missed, to be above 0 and "
                f"below 1, such as 0.1; got alpha={self.alpha!r}."
            )
        methods = ("auto", "none", *get_args(Method))
        require_one_of(_OWNER, "method", self.method, methods)
        require_one_of(_OWNER, "temperature", self.temperature, ("auto", "none", *get_args(Place)))
        require_one_of(_OWNER, "scope", self.scope, get_args(Scope))
        require_bool(_OWNER, "randomized", self.randomized)
        require_nonnegative(_OWNER, "penalty", self.penalty)
        require_integer(_OWNER, "free_classes", self.free_classes)
        names: Any = self.abstain
        if not isinstance(names, (list, tuple)):
            raise InputError(f"{_OWNER} needs abstain to be a list of scores; got {names!r}.")
        object.__setattr__(self, "abstain", tuple(names))
        for name in self.abstain:
            allowed = [score for score in SCORES if score != "energy"]  # it has no fixed range
            require_one_of(_OWNER, "abstain", name, allowed)

    def for_task(self, task: str, outputs: int) -> CalibrationSettings:
        """The settings with everything that the task decides; raises for what it does not have.

        Args:
            task: "classification" or "regression".
            outputs: of the model per row.
        """
        regression = task == "regression"
        methods = INTERVAL_METHODS if regression else CLASS_METHODS
        method = methods[0] if self.method == "auto" else self.method
        if method not in ("none", *methods):
            raise InputError(
                f"{_OWNER}: method '{method}' is not for {task}; use one of {', '.join(methods)}."
            )
        if regression and self.temperature in ("mean", "member"):
            raise InputError(
                f"{_OWNER}: temperature='{self.temperature}' scales class probabilities, and this "
                "is regression. Leave it out."
            )
        if self.scope == "class" and (regression or outputs > _MAX_CLASSES):
            raise InputError(
                f"{_OWNER}: scope='class' is for classification with at most {_MAX_CLASSES} "
                f"classes; this is {task} with {outputs} outputs. Use another scope."
            )
        if method == "absolute" and outputs != 1:
            raise InputError(
                f"{_OWNER}: method 'absolute' needs one output per row; the model has {outputs}."
            )
        if method == "cqr" and outputs < 2:
            raise InputError(
                f"{_OWNER}: method 'cqr' needs a model whose outputs are quantiles in ascending "
                "order, two or more; it has one output. Use method='absolute'."
            )
        return replace(
            self,
            method=method,
            temperature="none" if regression else self.temperature,
            abstain=() if regression else self.abstain,
        )

    @property
    def sets_thresholds(self) -> bool:
        """Whether rows are needed besides those that fit the temperature."""
        return self.method != "none" or bool(self.abstain)
