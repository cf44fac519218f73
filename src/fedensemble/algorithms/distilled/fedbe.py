"""FedBE: the server distils a Bayesian ensemble of the clients' models into their average.

Client:  w_i = local SGD from w.
Server:  mean = sum_i p_i w_i;   w^1 ... w^S ~ a distribution fitted to the w_i (posterior.py);
         teacher(x) = mean of softmax f(x; .) over {w^s, w_i, mean}, on unlabelled server data;
         w <- SGD from the mean on the cross-entropy between teacher and student, with a cyclical
         learning rate, averaged over the ends of the cycles (SWA).

Reference: Chen, Chao, "FedBE: making Bayesian model ensemble applicable to federated learning",
ICLR 2021.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.algorithm import algorithms
from ...core.types import Cohort, GatheredUploads
from ...errors import InputError
from ...flat_params import Tree
from ...modeling.server_context import Objective, ServerContext
from ..fedavg import FedAvg
from .distillation import ServerDistillation, soft_cross_entropy, train_students
from .posterior import sample_dirichlet, sample_gaussian

_MAX_SAMPLES = 10_000  # the samples of a mode are all in memory at the same time


@dataclass(frozen=True, kw_only=True)
class PosteriorSampling(FedAvg):
    """FedAvg with a distribution over models that is fitted to the clients' models of each mode.

    Args:
        samples: number of models drawn from the distribution, S.
        distribution: "gaussian" or "dirichlet".
        scale: factor of the Gaussian's standard deviation; 1 is that of the clients' models, the
            authors' code has 0.1.
        alpha: concentration of the Dirichlet distribution; the smaller, the further samples are
            from the mean.
    """

    gathers = True
    reference = "Chen and Chao 2021"

    samples: int = 10
    distribution: Literal["gaussian", "dirichlet"] = "gaussian"
    scale: float = 1.0
    alpha: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        owner = type(self).__name__
        if not 1 <= self.samples <= _MAX_SAMPLES:
            raise InputError(f"{owner} needs samples from 1 to {_MAX_SAMPLES}; got {self.samples}.")
        if self.distribution not in ("gaussian", "dirichlet"):
            raise InputError(
                f"{owner} needs distribution 'gaussian' or 'dirichlet'; got {self.distribution!r}."
            )
        if not self.scale >= 0 or not self.alpha > 0:
            raise InputError(
                f"{owner} needs scale >= 0 and alpha > 0; got {self.scale} and {self.alpha}."
            )

    def sample(self, mean: Tensor, cohort: Cohort) -> tuple[Tensor, GatheredUploads]:
        """Samples [K, S, P] around the mean [K, P], and the clients' models they were fitted to."""
        members = cohort.members
        if members is None:
            raise InputError(
                f"{type(self).__name__} needs the upload of each client, not only their means."
            )
        key = cohort.key(1)
        if self.distribution == "gaussian":
            return sample_gaussian(mean, members, key, self.samples, self.scale), members
        return sample_dirichlet(mean, members, key, self.samples, self.alpha), members


@algorithms.register("fedbe")
@dataclass(frozen=True, kw_only=True)
class FedBE(ServerDistillation, PosteriorSampling):
    """FedAvg whose server distils a Bayesian ensemble of the clients' models into their average.

    The server needs unlabelled inputs. Models are evaluated on them as in prediction: running
    statistics stay the mean of the clients' statistics, and dropout is off. For regression, the
    teacher is the mean output and the loss is the squared error. Modes that no client trained in a
    round are not distilled.

    SWA starts with the first cycle; in the authors' code it starts at step 500 (in the paper, 250).

    Args:
        server_epochs: passes over the server's data per round.
        server_batch: batch size on the server.
        server_lr, server_lr_low: the learning rate falls from the first to the second in each
            cycle, momentum is 0.9; the paper's values. Raise them if the server has much data. A
            teacher with nearly uniform probabilities makes a student with nearly uniform ones.
        cycle: steps per cycle of the learning rate; the paper has cycles of 25 steps, in many more
            steps. If a round has fewer steps than a cycle, the last model is used without
            averaging.
        temperature: of the teacher; below 1 it is sharper (the authors' code has 0.5), at 1 it is
            the ensemble's mean.
        class_reduction: how the terms of the cross-entropy are reduced over the C classes. "sum" is
            the cross-entropy of the paper; the authors' code uses "mean", which is C times smaller.
            Choose "mean" to use learning rates of that code. Ignored for regression.
    """

    instead: ClassVar[str] = "fedbe-nokd"

    server_epochs: int = 20
    server_batch: int = 128
    server_lr: float = 0.001
    server_lr_low: float = 0.0004
    cycle: int = 10
    temperature: float = 1.0
    class_reduction: Literal["sum", "mean"] = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("server_epochs", "server_batch", "cycle"):
            if getattr(self, name) < 1:
                raise InputError(f"FedBE needs {name} >= 1; got {getattr(self, name)}.")
        if self.class_reduction not in ("sum", "mean"):
            raise InputError(
                f"FedBE needs class_reduction 'sum' or 'mean'; got {self.class_reduction!r}."
            )
        if not self.temperature > 0:
            raise InputError(f"FedBE needs temperature > 0; got {self.temperature}.")
        if not 0 < self.server_lr_low <= self.server_lr:
            raise InputError(
                "FedBE needs 0 < server_lr_low <= server_lr; "
                f"got {self.server_lr_low} and {self.server_lr}."
            )

    def server_update(self, mode: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        """The distilled students; modes that no client trained are skipped and do not change."""
        trained, cohort = _restrict_to_trained(cohort)
        theta = uploads["theta"]
        if len(trained) == len(theta):
            return {"theta": self._train_students(theta, cohort)}
        students = self._train_students(theta[trained], cohort)
        return {"theta": mode["theta"].index_copy(0, trained, students)}

    def _train_students(self, mean: Tensor, cohort: Cohort) -> Tensor:
        """The students [K, P] of all modes of the cohort, from the clients' means [K, P]."""
        samples, members = self.sample(mean, cohort)
        context, x = self.server_inputs()
        buffers = members.shares(len(samples)).to(samples.dtype) @ members.buffers
        teacher = self.teacher(context, samples, mean, buffers, members)
        return self.distil(context, mean, buffers, x, teacher, cohort.key(2))

    def teacher(
        self,
        context: ServerContext,
        samples: Tensor,
        mean: Tensor,
        buffers: Tensor,
        members: GatheredUploads,
    ) -> Tensor:
        """Predictions of each mode's ensemble for the server's inputs, [K, n, ..., C]."""
        modes, count, _ = samples.shape
        # The models of all modes form one batch of K S + J + K models, so that they run at once;
        # `weights` [K, models] then averages, for each mode, over its own models.
        theta = torch.cat([samples.flatten(0, 1), members.uploads["theta"], mean])
        all_buffers = torch.cat([buffers.repeat_interleave(count, 0), members.buffers, buffers])
        index = torch.arange(modes, device=theta.device)
        mode_of_model = torch.cat([index.repeat_interleave(count), members.mode, index])
        belongs = (mode_of_model == index.unsqueeze(1)).to(theta.dtype)
        weights = belongs / belongs.sum(1, keepdim=True)
        predictions = context.mixture_of_predictions(weights, theta, all_buffers)
        if context.model.task == "regression" or self.temperature == 1:
            return predictions
        return (predictions.clamp(min=1e-30).log() / self.temperature).softmax(-1)

    def distil(
        self,
        context: ServerContext,
        theta: Tensor,
        buffers: Tensor,
        x: Tensor,
        teacher: Tensor,
        key: Tensor,
    ) -> Tensor:
        """The students [K, P] after training from `theta` on inputs x [n, ...] and the teacher."""
        objective: Objective = F.mse_loss
        if context.model.task == "classification":
            by_sum = self.class_reduction == "sum"
            objective = soft_cross_entropy() if by_sum else _mean_cross_entropy
        students = train_students(
            context,
            objective,
            theta,
            buffers,
            x,
            teacher,
            key,
            epochs=self.server_epochs,
            batch_size=self.server_batch,
            learning_rate=self._cyclical_rate,
        )
        cycle_end_sum, step, student = torch.zeros_like(theta), 0, theta
        for step, student in enumerate(students, 1):
            if step % self.cycle == 0:
                cycle_end_sum = cycle_end_sum + student
        return cycle_end_sum / (step // self.cycle) if step >= self.cycle else student

    def _cyclical_rate(self, step: int) -> float:
        """The server's learning rate in a step, counted from 0."""
        fraction = step % self.cycle / max(self.cycle - 1, 1)
        return (1 - fraction) * self.server_lr + fraction * self.server_lr_low


@algorithms.register("fedbe-nokd")
@dataclass(frozen=True, kw_only=True)
class FedBENoKD(PosteriorSampling):
    """FedBE without distillation: sampled models predict, and clients receive the clients' mean.

    The Fed-ensemble paper compares with this version, in which random sampling replaces
    distillation. The prediction of a mode is the mean over its S samples, which are the members of
    a `Prediction`. The server needs no data. The paper does not say which model the clients
    receive. The mean of the samples would have the same expectation as the clients' mean, but it
    would add noise with standard deviation spread / sqrt(S) to training in every round.

    A prediction needs all S samples of every mode: S times the bytes of a mode, see
    `Ensemble.prediction_bytes`.
    """

    def init_mode(self, theta: Tensor) -> Tree:
        return {"theta": theta, "samples": torch.cat([theta] * self.samples, -1)}

    def predictors(self, mode: Tree) -> Tensor:
        samples = mode["samples"]
        return samples.reshape(*samples.shape[:-1], self.samples, -1)

    def server_update(self, mode: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        samples, _ = self.sample(uploads["theta"], cohort)
        return {"theta": uploads["theta"], "samples": samples.flatten(1)}


def _restrict_to_trained(cohort: Cohort) -> tuple[Tensor, Cohort]:
    """The modes that were trained [T], and the cohort of these modes, renumbered 0 to T - 1."""
    is_trained = cohort.count.squeeze(-1) > 0
    trained = torch.nonzero(is_trained).flatten()
    if len(trained) == len(is_trained) or cohort.members is None:
        return torch.arange(len(is_trained), device=is_trained.device), cohort
    new_index = torch.cumsum(is_trained, 0) - 1
    members = cohort.members._replace(mode=new_index[cohort.members.mode])
    rows = {
        name: getattr(cohort, name)[trained] for name in ("count", "weight", "share", "shared_draw")
    }
    return trained, replace(cohort, members=members, **rows)


def _mean_cross_entropy(outputs: Tensor, teacher: Tensor) -> Tensor:
    """Cross-entropy with the mean over classes instead of the sum, as in the authors' code."""
    return -(teacher * outputs.log_softmax(-1)).mean()
