"""Normalized averaging: clients that take more local steps get no larger weight.

d_i = (w - w_i) / tau_i after tau_i local steps;   w <- w - mean(tau_i) mean(d_i).

Reference: Wang, Liu, Liang, Joshi, Poor, "Tackling the objective inconsistency problem in
heterogeneous federated optimization", NeurIPS 2020. The built-in `fednova` also knows
partial work, momentum and a server rate.
"""

from dataclasses import dataclass

import fedensemble as fe


@dataclass(frozen=True, kw_only=True)
class Normalized(fe.Algorithm):
    """FedAvg with normalized changes; equal to FedAvg if all clients take equally many steps."""

    reference = "Wang et al. 2020"
    sends = "change of the model and a count up, model down"
    plain_sgd = True  # with momentum, the local steps would have to be weighted differently

    def local_training(self, sent, memory, problem):
        steps = problem.counts.to(sent["theta"])  # [..., 1]
        change = sent["theta"] - problem.descend(sent["theta"])
        return {"direction": change / steps, "steps": steps}, memory

    def server_update(self, mode, uploads, cohort):
        return {"theta": mode["theta"] - uploads["steps"] * uploads["direction"]}
