"""IFCA, also called HypCluster: each client trains the mode with the lowest loss on its data.

Client:  c = argmin_k f_i(w_k);   w_i = local SGD from w_c;   uploads w_i - w_c and c.
Server:  w_k <- w_k + sum_i p_i (w_i - w_k) / sum_i p_i over the clients that chose k.

With start="clusters", all w_k are the same model w in the first round, and the server chooses c for
its clients: the cluster of w_i - w by k-means of the directions.

References: Ghosh, Chung, Yin, Ramchandran, "An efficient framework for clustered federated
learning", NeurIPS 2020, with model averaging; Mansour, Mohri, Ro, Suresh, "Three approaches for
personalization with applications to federated learning", 2020. Clusters of updates from one model:
Sattler, Mueller, Samek, "Clustered federated learning", 2020 (bipartitions); Duan et al.,
"FedGroup", 2021 (k-means of directions).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...core.algorithm import algorithms
from ...core.problem import LocalProblem
from ...core.types import Cohort, RoundResult
from ...core.visits.joint import trained_flags, with_choices
from ...errors import InputError
from ...flat_params import Tree, payload_bytes
from .joint import JointAlgorithm
from .update_clusters import cluster_updates


@algorithms.register("ifca")
@dataclass(frozen=True, kw_only=True)
class IFCA(JointAlgorithm):
    """Clusters clients: each trains the mode that has the lowest loss on all its training rows.

    A client downloads all K modes to choose from, and uploads the one that it trained. It keeps its
    choice, which `Federation.personal_weights` returns. With one mode, IFCA is FedAvg.

    Modes start from different models. If one of them is best for clients of several groups in the
    first rounds, these share it and other modes are never trained: which groups are found depends
    on the seed. `start="clusters"` avoids this.

    Args:
        probe_every: a client compares the modes in every `probe_every`-th of its visits, and keeps
            its choice in between. It then downloads only that mode. 1 is the paper's algorithm; 0
            compares in the first visit only.
        start: "random", also if None: K random models, as in the paper. "clusters": one random
            model for all modes; the server makes the modes from K clusters of the updates of the
            first round's clients, by k-means of their directions. The clients of that round should
            be several of each group. Choices before the modes differ are not kept.
    """

    reference = "Ghosh et al. 2020"
    sends = "the chosen mode and its number up, all modes down"

    probe_every: int = 1
    # None and not "random": settings that are None are not part of a run's hash.
    start: Literal["random", "clusters"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start not in (None, "random", "clusters"):
            raise InputError(f"IFCA needs start 'random' or 'clusters'; got {self.start!r}.")
        if self.probe_every < 0:
            raise InputError(f"IFCA needs probe_every >= 0; got {self.probe_every}.")

    def init_client_state(self, theta: Tensor) -> Tree:
        zero = torch.zeros_like(theta[..., :1])
        modes = torch.zeros_like(self.split(theta)[..., 0])
        return {"chosen": modes, "visits": zero}

    def local_training(self, sent: Tree, memory: Tree, problem: LocalProblem) -> tuple[Tree, Tree]:
        theta = self.split(sent["theta"])  # [..., K, P]
        received = self.split_statistics(problem.buffers, theta)
        losses, inside = problem.row_losses(theta, received)
        mean = (losses * inside.unsqueeze(-2)).sum(-1)  # [..., K]; all have the same number of rows
        best = torch.nn.functional.one_hot(mean.argmin(-1), mean.shape[-1]).to(theta.dtype)
        chosen = torch.where(self._probes(memory), best, memory["chosen"])
        # Equal modes have no best one. Rounding in a batch must not choose one either: all clients
        # train mode 0, and the choice does not count.
        equal = self._equal_modes(theta)
        first = torch.zeros_like(best)
        first[..., 0] = 1
        chosen = torch.where(equal, first, chosen)
        picks = chosen.unsqueeze(-1)  # [..., K, 1]
        # `torch.where` and not a product: a mode that is not finite would spoil the others.
        start, problem.buffers = (
            torch.where(picks > 0, value, 0).sum(-2) for value in (theta, received)
        )
        change = problem.descend(start) - start
        trained = torch.where(picks > 0, problem.buffers.unsqueeze(-2), received)
        problem.buffers = trained.flatten(-2)
        upload = (picks * change.unsqueeze(-2)).flatten(-2)
        memory = {
            "chosen": torch.where(equal, memory["chosen"], chosen),
            "visits": memory["visits"] + (~equal).to(theta.dtype),
        }
        return {"theta": upload, **trained_flags(chosen)}, memory

    def _equal_modes(self, theta: Tensor) -> Tensor:
        """Whether the modes [..., K, P] wait for their clusters, and are equal; bool [..., 1]."""
        if self.start != "clusters" or theta.shape[-2] == 1:
            return torch.zeros_like(theta[..., 0, :1], dtype=torch.bool)
        return (theta == theta[..., :1, :]).all(-1).all(-1, keepdim=True)

    def start_modes(self, theta: Tensor, buffers: Tensor) -> tuple[Tensor, Tensor]:
        if self.start != "clusters":
            return theta, buffers
        return theta[:1].repeat(len(theta), 1), buffers[:1].repeat(len(buffers), 1)

    def gathers_uploads(self, sent: Tree) -> bool:
        if self.start != "clusters":  # without waiting for a GPU
            return self.gathers
        return bool(self._equal_modes(self.split(sent["theta"])).all())

    def reassign(self, buffers: Tensor, result: RoundResult) -> RoundResult:
        """The result with the modes of clients that trained equal ones set to their clusters.

        If there are fewer clusters than modes, because few clients replied, the other modes become
        the mean over all clients. If there is only one, all modes stay equal, and the next round
        is clustered.
        """
        cohort = result.cohort
        assert cohort.members is not None
        changes = self.split(cohort.members.uploads["theta"])  # [J, K, P], 0 for the other modes
        modes, seed = changes.shape[1], int(cohort.key(1)[0]) % 2**32
        cluster = cluster_updates(changes.sum(1), modes, cohort.least, seed)
        picks = torch.nn.functional.one_hot(cluster, modes)
        picks[:, picks.sum(0) == 0] = 1
        return with_choices(result, buffers, picks.to(changes.device))

    def _probes(self, memory: Tree) -> Tensor:
        """Whether a client compares the modes in its next visit, bool [..., 1]."""
        visits = memory["visits"]
        if self.probe_every == 0:
            return visits == 0
        return visits % self.probe_every == 0

    def server_update(self, mode: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        return {"theta": mode["theta"] + uploads["theta"]}

    def personal_weights(self, memory: Tree) -> Tensor:
        chosen = memory["chosen"]
        return torch.where(memory["visits"] > 0, chosen, 1 / chosen.shape[-1])

    def download_bytes(
        self, sent: Tree, shared_draw: Tensor, memory: Tree | None = None
    ) -> int | Tensor:
        everything = payload_bytes(sent)
        if memory is None or self.probe_every == 1:
            return everything
        one = everything // memory["chosen"].shape[-1]
        return torch.where(self._probes(memory), everything, one)

    def upload_bytes(
        self, uploads: Tree, shared_draw: Tensor, sent: Tree | None = None
    ) -> int | Tensor:
        width = self.num_parameters or uploads["theta"].shape[-1]
        return (width + 1) * uploads["theta"].element_size()

    def encode(self, uploads: Tree, shared_draw: Tensor) -> Tree:
        changes = self.split(uploads["theta"])
        flags = torch.cat([value for name, value in uploads.items() if name != "theta"])
        mode = int(flags.argmax())
        return {"theta": changes[mode], "mode": torch.full_like(flags[:1], mode)}

    def decode(self, message: Tree, like: Tree, shared_draw: Tensor) -> Tree:
        changes = torch.zeros_like(self.split(like["theta"]))
        mode = int(message["mode"])
        if mode != float(message["mode"]) or not 0 <= mode < len(changes):
            raise ValueError(f"there is no mode {float(message['mode'])}")
        changes[mode] = message["theta"]
        flags = torch.zeros_like(changes[:, 0])
        flags[mode] = 1
        return {"theta": changes.flatten(), **trained_flags(flags)}
