"""Regularised modes as posterior samples: sample-then-optimise.

Mode k starts at w_k(0), a sample of the prior, and minimises

    L_k(w) = 1/n sum_j loss(f_w(x_j), y_j + e_kj) + prior_precision / (2 n) |w - a_k|^2,

where n counts the examples of all clients, a_k is w_k(0) if `anchor` is on and 0 otherwise, and
e_kj ~ N(0, target_noise^2) is drawn once per mode and example. Client i minimises the part of its
own examples with the whole penalty; the weighted mean over clients of these objectives is L_k.

The minimisers are exact and independent samples of p(w | D) if the model is linear in w, the loss
is the squared error with noise s, prior_precision is the precision of the prior in the units of the
loss, target_noise = s, and modes start in the prior. Without anchors all modes have the same
minimum. Without noise of the targets the spread is too small: the covariance is alpha S^2 instead
of the posterior's S, for the prior precision alpha.

References: Matthews, Hron, Turner, Ghahramani, "Sample-then-optimize posterior sampling for
Bayesian linear models", NeurIPS workshop on advances in approximate Bayesian inference 2017;
Pearce, Leibfried, Brintrup, "Uncertainty in neural networks: approximately Bayesian ensembling",
AISTATS 2020.
"""

from copy import copy
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ..core.algorithm import algorithms
from ..core.problem import LocalProblem
from ..core.types import Cohort
from ..errors import InputError
from ..flat_params import Tree
from ..modeling.server_context import ServerContext
from .fedavg import FedAvg


@algorithms.register("anchored")
@dataclass(frozen=True, kw_only=True)
class Anchored(FedAvg):
    """FedAvg with a Gaussian prior: modes are MAP estimates, or samples of the posterior.

    The minimum of the sum over clients is reached with one local step per round and a learning rate
    that is small or decays; with more local steps, clients drift as in FedAvg.

    Args:
        prior_precision: alpha of the prior N(0, 1 / alpha) of the weights if the loss of an example
            is its negative log-likelihood; it adds alpha / n times the weights to the gradient of
            the mean loss, for n examples of all clients. Loss "mse" is 2 s^2 times the negative
            log-likelihood of targets with standard deviation s: pass 2 s^2 alpha. The prior is the
            distribution from which modes start, if alpha is its precision (1 for model "wide", 1 /
            scale^2 for "rbf").
        anchor: pull each mode to its own start instead of to zero. The start is sent with the
            model.
        target_noise: standard deviation of noise that each mode adds to the targets, the same in
            every round; regression only. With the noise of the data, modes of a linear model are
            exact posterior samples.
    """

    reference = "Matthews et al. 2017"
    sends = "model up, 2 models (the second is the anchor) and strength down"

    prior_precision: float = 1.0
    anchor: bool = True
    target_noise: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("prior_precision", "target_noise"):
            if not getattr(self, name) >= 0:
                raise InputError(f"Anchored needs {name} >= 0; got {getattr(self, name)}.")

    @property
    def target_spread(self) -> float:
        return self.target_noise

    def bind(self, context: ServerContext) -> Self:
        if self.target_noise > 0 and context.model.task != "regression":
            raise InputError(
                f"Anchored needs target_noise = 0 for classification; got {self.target_noise}."
            )
        bound = copy(self)
        if context.training_examples is not None:
            object.__setattr__(bound, "training_examples", context.training_examples)
        return bound

    # Number of examples of all clients; one if the algorithm is used without a federation.
    training_examples = 1

    def init_mode(self, theta: Tensor) -> Tree:
        return {"theta": theta, "anchor": theta} if self.anchor else {"theta": theta}

    def broadcast(self, mode: Tree) -> Tree:
        # The server sends the strength, because a client does not know the others' examples.
        strength = self.prior_precision / self.training_examples
        return {**mode, "strength": torch.full_like(mode["theta"][..., :1], strength)}

    def local_training(self, sent: Tree, memory: Tree, problem: LocalProblem) -> tuple[Tree, Tree]:
        strength, anchor = sent["strength"], sent.get("anchor")

        def add_prior(theta: Tensor, gradient: Tensor) -> Tensor:
            return gradient + strength * (theta if anchor is None else theta - anchor)

        return {"theta": problem.descend(sent["theta"], add_prior)}, memory

    def server_update(self, mode: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        return {**mode, "theta": uploads["theta"]}
