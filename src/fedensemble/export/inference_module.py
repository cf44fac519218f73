"""An ensemble as one nn.Module: stored inputs to what `Ensemble.predict` returns, as tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..modeling.losses import Loss, class_logits
from ..modeling.parameter_swap import set_parameters
from ..uncertainty.calibration import Calibration
from ..uncertainty.scores import concentration

if TYPE_CHECKING:
    from ..predict import Ensemble

CLASSIFICATION = ("mean", "label", "entropy", "mutual_information", "members")
REGRESSION = ("mean", "variance", "members")
# Of a calibrated ensemble, besides the others.
SETS, INTERVAL, ANSWERED = "sets", "interval", "answered"


class InferenceModule(nn.Module):
    """All models of an ensemble with the normalization before and the combination after them.

    The models are a list of K * S submodules. Stacked parameters with `vmap` would be a smaller
    graph, but torch.export then fixes the batch size of convolutions, and an LSTM has no vmap.

    A calibrated ensemble scales by its temperatures, and has one more output: prediction sets or
    intervals.

    Args:
        ensemble: whose models are copied to the CPU.
        client: whose thresholds the sets or intervals have, if the ensemble was calibrated for each
            client; None for one that did not take part.
        most_entropy: largest entropy that is answered, for an output "answered"; None leaves it
            out.
    """

    def __init__(
        self, ensemble: Ensemble, client: str | int | None = None, most_entropy: float | None = None
    ) -> None:
        super().__init__()
        modes, samples = ensemble.predictors.shape[:2]
        self.models = nn.ModuleList(
            ensemble.module(mode, sample) for mode in range(modes) for sample in range(samples)
        )
        # One copy of frozen parameters, which a file then has once as well.
        own = dict(self.models[0].named_parameters())
        frozen = {name: own[name] for name in ensemble.model.frozen}
        for model in self.models[1:]:
            set_parameters(model, frozen)
        self.modes, self.samples = modes, samples
        self.dtype = ensemble.model.dtype
        self.standardise = ensemble.standardise
        self.loss: str | Loss = ensemble.model.user_loss
        self.by_logits, self.dirichlet = ensemble.combine == "logits", ensemble.dirichlet
        calibration = ensemble.calibration
        self.place = None if calibration is None else calibration.place
        self.temperatures = () if calibration is None else calibration.temperatures
        self.classifies = ensemble.model.task == "classification"
        names: tuple[str, ...] = CLASSIFICATION if self.classifies else REGRESSION
        self.calibration: Calibration | None = None
        self.threshold = torch.empty(0)
        if calibration is not None and calibration.has_sets:
            self.calibration = calibration
            self.threshold = calibration.row_thresholds(1, client)  # [1, C] or [1, 1] float64
            names += (SETS if self.classifies else INTERVAL,)
        self.most_entropy = most_entropy
        self.output_names = (*names, ANSWERED) if most_entropy is not None else names
        self.eval()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """The outputs by name; shapes are those of `Prediction`."""
        if self.standardise is not None:
            x = self.standardise(x, self.dtype)
        # A model may write into its inputs.
        outputs = [class_logits(self.loss, model(x.clone())) for model in self.models]
        raw = torch.stack(outputs)  # [K * S, B, ..., C]
        if not self.classifies:
            spread = raw.var(0) if len(outputs) > 1 else torch.zeros_like(raw[0])
            found = {"mean": raw.mean(0), "variance": spread, "members": raw}
            if self.calibration is not None:
                ends = self.calibration.interval_within(found["mean"], self.threshold)
                found[INTERVAL] = ends.to(raw.dtype)
            return found
        if self.place == "member":
            scale = torch.tensor(self.temperatures, dtype=raw.dtype)
            scale = scale.repeat_interleave(self.samples)
            raw = raw / scale.reshape(-1, *[1] * (raw.dim() - 1))
        members = raw.softmax(-1)
        mean = raw.mean(0).softmax(-1) if self.by_logits else members.mean(0)
        if self.place == "mean":
            # As `scaled_mean`: by logarithms, because a probability can be 0 in floating point.
            logits = raw.mean(0) if self.by_logits else raw.log_softmax(-1).logsumexp(0)
            mean = (logits / self.temperatures[0]).softmax(-1)
        if self.dirichlet:
            member_entropy = _expected_entropy(members, -raw.logsumexp(-1)).mean(0)
        else:
            member_entropy = _entropy(members).mean(0)
        found = {
            "mean": mean,
            "label": mean.argmax(-1),
            "entropy": _entropy(mean),
            "mutual_information": (_entropy(members.mean(0)) - member_entropy).clamp(min=0),
            "members": members,
        }
        if self.calibration is not None:
            found[SETS] = self.calibration.sets_within(mean, self.threshold)
        if self.most_entropy is not None:
            found[ANSWERED] = found["entropy"] <= self.most_entropy
        return found


def _entropy(probabilities: Tensor) -> Tensor:
    """Entropy over the last dimension in nats; ONNX has no xlogy."""
    smallest = torch.finfo(probabilities.dtype).tiny  # 0 log 0 = 0
    return -(probabilities * probabilities.clamp(min=smallest).log()).sum(-1)


def _expected_entropy(members: Tensor, energy: Tensor) -> Tensor:
    """As `uncertainty.scores.expected_entropy`, without digamma, which ONNX lacks."""
    total = concentration(energy).unsqueeze(-1)
    return (members * (_digamma(total + 1) - _digamma(members * total + 1))).sum(-1)


def _digamma(x: Tensor) -> Tensor:
    """The digamma function for x >= 1, with an error below 1e-9 besides rounding.

    digamma(x) = digamma(x + 6) - sum of 1 / (x + i) for i < 6, and the asymptotic series is exact
    enough from 7 on.
    """
    below = torch.zeros_like(x)
    for i in range(6):
        below = below + 1 / (x + i)
    y = x + 6
    square = 1 / (y * y)
    series = square * (1 / 12 - square * (1 / 120 - square * (1 / 252 - square / 240)))
    return y.log() - 0.5 / y - series - below
