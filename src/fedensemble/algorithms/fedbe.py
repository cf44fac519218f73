"""FedBE: a Bayesian ensemble of the clients' models teaches the average model on the server's own,
unlabelled data.

w_i = local SGD from w on client i;   mean = sum_i p_i w_i;   w^1 ... w^S ~ the distribution of the
w_i (posterior.py); teacher(x) = the mean of softmax over {w^s, w_i, mean};   w <- SGD from the mean
on the cross-entropy between teacher and student, under a cyclical learning rate, averaged over the
ends of its cycles (SWA).

Reference: Chen, Chao, "FedBE: making Bayesian model ensemble applicable to federated learning",
ICLR 2021.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import prng
from ..core.algorithm import algorithms
from ..core.optimizer import SGD
from ..core.types import Cohort, Members
from ..errors import InputError
from ..flat_params import Tree
from ..modeling.server_context import Objective, ServerContext
from .fedavg import FedAvg
from .posterior import dirichlet, gaussian

_MOST_SAMPLES = 10_000  # a mode then has as many models in memory


@dataclass(frozen=True, kw_only=True)
class Sampled(FedAvg):
    """FedAvg with a distribution over the models of a mode's clients.

    Args:
        samples: models drawn from it, S.
        distribution: "gaussian" or "dirichlet".
        scale: of the Gaussian's standard deviation; 1 is the clients' own, the authors' code has
            0.1.
        alpha: of the Dirichlet distribution; the smaller, the further samples are from the mean.
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
        if not 1 <= self.samples <= _MOST_SAMPLES:
            raise InputError(
                f"{owner} needs samples from 1 to {_MOST_SAMPLES}; got {self.samples}."
            )
        if self.distribution not in ("gaussian", "dirichlet"):
            raise InputError(
                f"{owner} needs distribution 'gaussian' or 'dirichlet'; got {self.distribution!r}."
            )
        if not self.scale >= 0 or not self.alpha > 0:
            raise InputError(
                f"{owner} needs scale >= 0 and alpha > 0; got {self.scale} and {self.alpha}."
            )

    def sample(self, mean: Tensor, cohort: Cohort) -> tuple[Tensor, Members]:
        """Models [K, S, P] from the distribution about the mean [K, P], and the clients' models it
        was fitted to.
        """
        if cohort.members is None:
            raise InputError(f"{type(self).__name__} needs what each client sent, not means alone.")
        if self.distribution == "gaussian":
            return gaussian(
                mean, cohort.members, cohort.key(1), self.samples, self.scale
            ), cohort.members
        return dirichlet(
            mean, cohort.members, cohort.key(1), self.samples, self.alpha
        ), cohort.members


@algorithms.register("fedbe")
@dataclass(frozen=True, kw_only=True)
class FedBE(Sampled):
    """FedAvg whose server distils a Bayesian ensemble of the clients' models into their average.

    It needs unlabelled inputs on the server. There, models are evaluated as in predictions: running
    statistics stay those of the clients' mean, dropout is off. For regression, teacher and loss are
    the mean output and squared error. Modes that nobody trained in a round are not distilled.

    SWA starts with the first cycle; in the authors' code it starts at step 500 (in the paper, 250).

    Args:
        server_epochs: passes over the server's data in a round.
        server_batch: its batch size.
        server_lr, server_lr_low: the rate falls from the first to the second in each cycle,
            momentum is 0.9; the paper's values. Raise them for a server with much data: a flat
            teacher makes a flat student.
        cycle: its steps; the paper has 25 of many more. If a round has fewer, the last model is
            taken as it is.
        temperature: of the teacher; below 1 it is sharper (the authors' code has 0.5), at 1 it is
            the ensemble's mean.
        class_reduction: how the terms of the cross-entropy are reduced over C classes. "sum" is the
            cross-entropy of the paper; the authors' code takes their "mean", which is C times
            smaller. With "mean", the same rates therefore act as they do in that code. Regression
            ignores it.
    """

    distils: ClassVar[bool] = True
    workshop: ClassVar[ServerContext | None] = None  # what it is bound to

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
                f"FedBE needs 0 < server_lr_low <= server_lr; got {self.server_lr_low} and {self.server_lr}."
            )

    @property
    def notes(self) -> tuple[str, ...]:
        return () if self.workshop is None else self.workshop.notes

    def bind(self, workshop: ServerContext) -> Self:
        if workshop.unlabelled is None:
            raise InputError(
                "FedBE distils on unlabelled inputs of the server's own, and there are none. Hold some training "
                "examples back with data.server_share = 0.1, give a file with data.server_file = 'inputs.npz', pass "
                "x_server to FederatedData, or use 'fedbe-nokd'."
            )
        bound = copy(self)
        object.__setattr__(bound, "workshop", workshop)
        return bound

    def server_update(self, mode: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        """The distilled students; a mode that nobody trained keeps its weights and costs
        nothing.
        """
        trained, cohort = _only_trained(cohort)
        theta = uploads["theta"]
        if len(trained) == len(theta):
            return {"theta": self._student(theta, cohort)}
        return {
            "theta": mode["theta"].index_copy(0, trained, self._student(theta[trained], cohort))
        }

    def _student(self, mean: Tensor, cohort: Cohort) -> Tensor:
        samples, members = self.sample(mean, cohort)
        if self.workshop is None or self.workshop.unlabelled is None:
            raise InputError("FedBE is not bound to a server with data; a Federation does that.")
        buffers = members.shares(len(samples)).to(samples.dtype) @ members.buffers
        teacher = self.teacher(self.workshop, samples, mean, buffers, members)
        return self.distil(
            self.workshop, mean, buffers, self.workshop.unlabelled, teacher, cohort.key(2)
        )

    def teacher(
        self,
        workshop: ServerContext,
        samples: Tensor,
        mean: Tensor,
        buffers: Tensor,
        members: Members,
    ) -> Tensor:
        """What each mode's ensemble says of the server's data, [K, n, ..., C]."""
        modes, count, _ = samples.shape
        theta = torch.cat([samples.flatten(0, 1), members.uploads["theta"], mean])
        statistics = torch.cat([buffers.repeat_interleave(count, 0), members.buffers, buffers])
        owner = torch.arange(modes, device=theta.device)
        owner = torch.cat([owner.repeat_interleave(count), members.mode, owner])
        own = (owner == torch.arange(modes, device=theta.device).unsqueeze(1)).to(theta.dtype)
        said = workshop.mixture(own / own.sum(1, keepdim=True), theta, statistics)
        if workshop.learner.task == "regression" or self.temperature == 1:
            return said
        return (said.clamp(min=1e-30).log() / self.temperature).softmax(-1)

    def distil(
        self,
        workshop: ServerContext,
        theta: Tensor,
        buffers: Tensor,
        own: Tensor,
        teacher: Tensor,
        key: Tensor,
    ) -> Tensor:
        """The students [K, P] after training from `theta` on the server's own inputs and the
        teacher's words.
        """
        objective: Objective = F.mse_loss
        if workshop.learner.task == "classification":
            objective = _cross_entropy if self.class_reduction == "sum" else _mean_cross_entropy
        optimizer = SGD(momentum=0.9)
        slots, average, step = optimizer.slots(theta), torch.zeros_like(theta), 0
        which = torch.arange(len(theta), device=theta.device).unsqueeze(1)
        epochs = torch.arange(self.server_epochs, device=key.device).unsqueeze(1)
        for order in prng.permutation(prng.fold(key, epochs), teacher.shape[1]):  # [K, n]
            batches = (
                torch.split(whole, self.server_batch, 1) for whole in (order, teacher[which, order])
            )
            for rows, target in zip(*batches, strict=True):
                gradient = workshop.gradient(objective, theta, buffers, own[rows], target)
                part = step % self.cycle / max(self.cycle - 1, 1)
                lr = (1 - part) * self.server_lr + part * self.server_lr_low
                theta, slots = optimizer.step(theta, gradient, slots, lr)
                step += 1
                if step % self.cycle == 0:
                    average = average + theta
        return average / (step // self.cycle) if step >= self.cycle else theta


@algorithms.register("fedbe-nokd")
@dataclass(frozen=True, kw_only=True)
class FedBENoKD(Sampled):
    """FedBE without distillation: the sampled models predict, and the clients' mean goes down to
    the clients.

    The comparison of the Fed-ensemble paper, in which random sampling replaces distillation. A
    mode's prediction is the mean over its S samples, which are the members of a `Prediction`; no
    data on the server are needed. The paper does not say which model the clients receive. The mean
    of the samples has the same expectation as the clients' mean, and noise of spread / sqrt(S) on
    top, which would enter training in every round.

    Whoever predicts needs all S samples of every mode: S times the bytes of a mode, see
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


def _only_trained(cohort: Cohort) -> tuple[Tensor, Cohort]:
    """The modes that somebody trained [T], and the cohort with them alone, numbered from 0 to T -
    1.
    """
    there = cohort.count.squeeze(-1) > 0
    trained = torch.nonzero(there).flatten()
    if len(trained) == len(there) or cohort.members is None:
        return torch.arange(len(there), device=there.device), cohort
    number = torch.cumsum(there, 0) - 1
    members = cohort.members._replace(mode=number[cohort.members.mode])
    rows = {name: getattr(cohort, name)[trained] for name in ("count", "weight", "share", "coin")}
    return trained, replace(cohort, members=members, **rows)


def _cross_entropy(outputs: Tensor, teacher: Tensor) -> Tensor:
    """Cross-entropy between the teacher's probabilities and the student's."""
    return -(teacher * outputs.log_softmax(-1)).sum(-1).mean()


def _mean_cross_entropy(outputs: Tensor, teacher: Tensor) -> Tensor:
    """The same with the mean over classes, as in the authors' code."""
    return -(teacher * outputs.log_softmax(-1)).mean()
