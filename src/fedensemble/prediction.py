"""What an ensemble predicts: the average over its modes, and how much they disagree."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .arguments import require_one_of
from .display import (
    prediction_line,
    prediction_table,
)
from .errors import InputError
from .modeling.losses import Task
from .uncertainty.abstention import (
    Abstention,
    abstain_above,
    check_threshold,
    coverage_threshold,
    is_wrong,
    require_share,
    risk_threshold,
)
from .uncertainty.calibration import Calibration
from .uncertainty.scores import (
    SCORES,
    Score,
    ensemble_energy,
    entropy,
    expected_entropy,
    mutual_information,
    probability_score,
)
from .uncertainty.targets import check_below, check_targets

Combine = Literal["probabilities", "logits", "outputs"]


@dataclass(frozen=True)
class Prediction:
    """The prediction of K modes for B inputs.

    A member is the prediction of one model. Most modes have one member; a mode of FedBE-noKD has S
    members, one per posterior sample. For classification, `members` are class probabilities and
    `mean` is their combination. For regression, both are outputs.

    Args:
        mean: the ensemble's prediction, [B, ..., C].
        members: the prediction of each model, [K * S, B, ..., C].
        mode_index: the mode of each member, [K * S] int64, from 0 to K - 1 in ascending order. By
            default each member is a mode.
        class_names: name of each class, or None.
        member_energy: -logsumexp of the logits of each member, [K * S, B, ...]; None if they are
            not known. Probabilities do not contain it.
        calibration: of the ensemble, if it has one.
        client: that the inputs belong to, see `Ensemble.predict`.
        dirichlet: whether each member predicts a distribution over class probabilities, of which
            `members` is the mean; see `Ensemble.distill`.
    """

    mean: Tensor
    members: Tensor
    task: Task = "classification"
    combine: Combine = "probabilities"
    mode_index: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    class_names: tuple[str, ...] | None = None
    member_energy: Tensor | None = None
    calibration: Calibration | None = None
    client: Any = None
    dirichlet: bool = False

    def __post_init__(self) -> None:
        if not len(self.mode_index):
            object.__setattr__(self, "mode_index", torch.arange(len(self.members)))
        if self.mode_index.shape != self.members.shape[:1]:
            raise InputError(
                "Prediction needs one mode_index per member; "
                f"got {tuple(self.mode_index.shape)} for {len(self.members)} members."
            )

    def __repr__(self) -> str:
        """The number of examples, classes and modes, and the mean uncertainty, on one line."""
        return prediction_line(self)

    def _repr_html_(self) -> str:
        return prediction_table(self)

    @cached_property
    def modes(self) -> Tensor:
        """The prediction of each mode, [K, B, ..., C]: the combination of its members."""
        sizes = torch.unique_consecutive(self.mode_index, return_counts=True)[1].tolist()
        if max(sizes) == 1:
            return self.members
        return torch.stack(
            [self._combine_members(part) for part in torch.split(self.members, sizes)]
        )

    def _combine_members(self, members: Tensor) -> Tensor:
        """The combination of the members of one mode, [S, B, ..., C] -> [B, ..., C]."""
        # Averages logits: log-probabilities are logits up to a constant, which softmax ignores.
        if self.combine == "logits":
            smallest = torch.finfo(members.dtype).tiny
            return members.clamp(min=smallest).log().mean(0).softmax(-1)
        return members.mean(0)

    @cached_property
    def label(self) -> Tensor:
        """The most probable class, [B, ...]."""
        self._require_classification("label")
        return self.mean.argmax(-1)

    @cached_property
    def label_names(self) -> NDArray[np.str_]:
        """The name of the most probable class, [B, ...]; its number as text without class names."""
        self._require_classification("label_names")
        names = self.class_names or [str(number) for number in range(self.mean.shape[-1])]
        named: NDArray[np.str_] = np.array(names)[self.label.numpy(force=True)]
        return named

    @cached_property
    def entropy(self) -> Tensor:
        """Entropy of the ensemble's prediction in nats, [B, ...]: the total uncertainty."""
        self._require_classification("entropy")
        return entropy(self.mean)

    @cached_property
    def member_entropy(self) -> Tensor:
        """Mean entropy of the members, [B, ...]: uncertainty that more members cannot reduce.

        For members that predict Dirichlet distributions, the entropy that is expected of them.
        """
        self._require_classification("member_entropy")
        if self.dirichlet and self.member_energy is not None:
            return expected_entropy(self.members, self.member_energy).mean(0)
        return entropy(self.members).mean(0)

    @cached_property
    def mutual_information(self) -> Tensor:
        """Entropy of the mean minus mean entropy, [B, ...]: how much members disagree; >= 0."""
        self._require_classification("mutual_information")
        return mutual_information(self.members, self.member_entropy)

    @cached_property
    def variance(self) -> Tensor:
        """Unbiased variance over members, [B, ..., C]; zero for one member.

        For regression, it is no estimate of the error: the spread of the members is not a
        prediction interval.
        """
        return self.members.var(0) if len(self.members) > 1 else torch.zeros_like(self.mean)

    @cached_property
    def sets(self) -> Tensor:
        """Which classes the true one is among, bool [B, C]; a calibrated ensemble has them.

        A set can be empty: no class fits as well as the true ones of the calibration rows did.
        """
        self._require_classification("sets")
        return self._calibrated("sets").sets(self.mean, self.client)

    @cached_property
    def set_names(self) -> list[list[str]]:
        """The names of the classes in each prediction set, most probable first, B lists."""
        names = self.class_names or [str(number) for number in range(self.mean.shape[-1])]
        order = self.mean.argsort(dim=-1, descending=True, stable=True)
        inside = self.sets.gather(-1, order)
        return [
            [names[label] for label, has in zip(labels, row, strict=True) if has]
            for labels, row in zip(order.tolist(), inside.tolist(), strict=True)
        ]

    @cached_property
    def interval(self) -> Tensor:
        """Lower and upper end of each target's interval, [B, 2]; a calibrated ensemble has them."""
        if self.task != "regression":
            raise InputError("'interval' is for regression; prediction sets are in .sets.")
        return self._calibrated("intervals").interval(self.mean, self.client).to(self.mean.dtype)

    def _calibrated(self, what: str) -> Calibration:
        """The calibration; raises if it does not make prediction sets or intervals."""
        if self.calibration is None or not self.calibration.has_sets:
            raise InputError(
                f"There are no prediction {what} without calibration: call Federation.calibrate(), "
                "or `fedensemble calibrate` with the folder of the run."
            )
        return self.calibration

    def uncertainty(self, score: Score = "entropy") -> Tensor:
        """A score of uncertainty of each input, [B, ...]; the higher, the less certain.

        Args:
            score: "entropy" and "mutual_information" are the properties of these names.
                "max_probability" is 1 less the probability of the most probable class,
                "variation_ratio" the share of members with another label than most members.
                "energy" is -log sum exp of the logits: of the mean logits if the ensemble averages
                logits, and otherwise the mean over members.
        """
        require_one_of("uncertainty()", "score", score, SCORES)
        self._require_classification(score)
        if score in ("entropy", "mutual_information"):  # cached
            values: Tensor = getattr(self, score)
            return values
        if score != "energy":
            return probability_score(score, self.mean, self.members)
        if self.member_energy is None:
            raise InputError(
                "'energy' needs the logits of the members, which this prediction does not have. "
                "Use what Ensemble.predict returns, or another score."
            )
        by_logits = self.combine == "logits"
        return ensemble_energy(self.members, self.member_energy, by_logits=by_logits)

    def abstain(
        self,
        *,
        risk: float | None = None,
        coverage: float | None = None,
        threshold: float | None = None,
        calibration: tuple[Prediction, Any] | Prediction | None = None,
        score: Score = "entropy",
        confidence: float = 0.95,
    ) -> Abstention:
        """Which rows are sure enough to be answered, and their labels.

        Exactly one of `risk`, `coverage` and `threshold` decides it.

        Args:
            risk: largest share of errors among the answered rows. Calibration data are required,
                and certify it with the probability `confidence`; if no threshold is certified,
                nothing is answered.
            coverage: share of the rows to answer: of the calibration data, or without them of this
                prediction. Ties can make it more.
            threshold: largest uncertainty to answer.
            calibration: a prediction of the same ensemble for data that it was not trained on, and
                its labels. `coverage` needs no labels: it also takes the prediction alone. None
                takes the clients' calibration rows, if the ensemble was calibrated.
            score: measure of uncertainty; see `uncertainty`.
            confidence: probability that the risk is kept, over calibration data.
        """
        if sum(value is not None for value in (risk, coverage, threshold)) != 1:
            raise InputError("abstain() needs one of risk, coverage and threshold, and only one.")
        values = self.uncertainty(score)
        if threshold is not None:
            if calibration is not None:
                raise InputError("abstain(threshold=...) does not use calibration: leave it out.")
            largest = check_threshold(threshold)
        elif coverage is not None:
            coverage = require_share("coverage", coverage, or_one=True)
            reference = self if calibration is None else self._calibration(calibration)[0]
            known_values = (
                self.calibration.abstention_rows(score)[0]
                if calibration is None and self.calibration is not None
                else reference.uncertainty(score)
            )
            largest = coverage_threshold(known_values, coverage)
        else:
            risk = require_share("risk", risk)
            confidence = require_share("confidence", confidence)
            if calibration is None and self.calibration is not None:
                known_values, wrong = self.calibration.abstention_rows(score)
            else:
                known, target = self._calibration(calibration, labels=True)
                known_values, wrong = known.uncertainty(score), is_wrong(known.label, target)
            largest = risk_threshold(known_values, wrong, risk, confidence)
        return abstain_above(largest, values, self.label, score)

    def _calibration(self, given: Any, *, labels: bool = False) -> tuple[Prediction, Any]:
        """The prediction of `abstain(calibration=...)` and its checked labels, or None."""
        pair = isinstance(given, tuple) and len(given) == 2
        known, target = given if pair else (given, None)
        if not isinstance(known, Prediction) or (labels and target is None):
            raise InputError(
                "abstain() needs calibration=(prediction, labels): what the same ensemble predicts "
                "for data that it was not trained on, and their true labels."
            )
        known._require_classification("calibration")
        shape, other = ((len(p.members), p.mean.shape[-1]) for p in (self, known))
        if shape != other:
            raise InputError(
                "abstain() needs a calibration by the same ensemble: this prediction has (members, "
                f"classes) = {shape}, and the calibration {other}."
            )
        if target is None:
            return known, None
        names = known.class_names
        target = check_targets(known.mean, target, regression=False, class_names=names)
        check_below(target, known.mean.shape[-1])
        return known, target

    def _require_classification(self, name: str) -> None:
        if self.task != "classification":
            raise InputError(
                f"'{name}' needs class probabilities, and this is {self.task}; "
                "use .mean and .variance."
            )
