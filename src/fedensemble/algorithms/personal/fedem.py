"""FedEM: each client's data are a mixture of K distributions, with a model for each.

Client:  q_k(s) ~ pi_ik exp(-loss of w_k on row s), which sum to 1 over k, for each row s;
         pi_ik <- mean over the client's rows of q_k(s), which stays on the client;
         w_ik = local SGD from w_k on the minibatch mean of q_k(s) loss(w, s), for all k.
Server:  w_k <- sum_i p_i w_ik / sum_i p_i.

Reference: Marfoq, Neglia, Bellet, Kameni, Vidal, "Federated multi-task learning under a mixture of
distributions", NeurIPS 2021.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.algorithm import algorithms
from ...core.problem import LocalProblem
from ...flat_params import Tree
from .joint import JointAlgorithm


@algorithms.register("fedem")
@dataclass(frozen=True, kw_only=True)
class FedEM(JointAlgorithm):
    """Trains all K modes in each visit, each on the rows that it explains best.

    A client downloads, trains and uploads all modes: its costs are K times those of FedAvg. Its
    client state are the weights of the modes, which start equal; `Federation.personal_weights`
    returns them. Its own prediction is the mean of the modes' probabilities with these weights.
    With one mode, FedEM is FedAvg.

    The reported loss of a visit is the mean over rows of sum_k q_k(s) loss(w_k, s).
    """

    reference = "Marfoq et al. 2021"
    sends = "all modes up, all modes down"

    def init_client_state(self, theta: Tensor) -> Tree:
        modes = self.split(theta).shape[-2]
        return {"share": torch.full_like(theta[..., :1], 1 / modes).repeat_interleave(modes, -1)}

    def local_training(self, sent: Tree, memory: Tree, problem: LocalProblem) -> tuple[Tree, Tree]:
        theta = self.split(sent["theta"])
        losses, inside = problem.row_losses(theta, self.split_statistics(problem.buffers, theta))
        # A mode whose weight has become 0 in floating point keeps it: log(0) is -inf.
        weight = torch.softmax(memory["share"].log().unsqueeze(-1) - losses, -2)  # [..., K, n]
        rows = inside.unsqueeze(-2)
        share = (weight * rows).sum(-1) / rows.sum(-1)
        problem.weigh_rows(weight)
        return {"theta": problem.descend(sent["theta"])}, {"share": share}

    def personal_weights(self, memory: Tree) -> Tensor:
        return memory["share"]
