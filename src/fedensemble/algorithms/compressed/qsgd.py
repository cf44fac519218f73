"""QSGD: FedAvg whose clients upload their change in compressed form.

D_i = Q(w_i - w);   w <- w + mean_S D_i.

Q is TernGrad by default (ternary, maximum norm of a block); compressor = "qsgd" is the dithering of
the QSGD paper.

Reference: Alistarh, Grubic, Li, Tomioka, Vojnovic, "QSGD: communication-efficient SGD via gradient
quantization and encoding", NeurIPS 2017; Wen, Xu, Yan, Wu, Wang, Chen, Li, "TernGrad: ternary
gradients to reduce communication in distributed deep learning", NeurIPS 2017.
"""

from dataclasses import dataclass

from ...core.algorithm import algorithms
from ...core.problem import LocalProblem
from ...core.types import Cohort
from ...flat_params import Tree
from .compressed_uploads import CompressedUploads


@algorithms.register("qsgd")
@dataclass(frozen=True, kw_only=True)
class QSGD(CompressedUploads):
    """FedAvg with compressed uploads; compression noise keeps it at a distance from the optimum.

    The baseline of DIANA and DORE, and the only algorithm that accepts top-k. Under partial
    participation the mean is taken over the clients that report.

    The default compressor is that of TernGrad: three values and the maximum norm of a block, which
    has less variance than the 2-norm. `compressor = "qsgd"` is that of Alistarh et al., dithering
    with the 2-norm and s = `levels`.
    """

    reference = "Alistarh et al. 2017"
    sends = "encoded change up, model down"
    needs_unbiased = False

    def local_training(self, sent: Tree, memory: Tree, problem: LocalProblem) -> tuple[Tree, Tree]:
        change = problem.descend(sent["theta"]) - sent["theta"]
        return {"change": self.codec.compress(change, problem.uniform(change))}, memory

    def server_update(self, mode: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        return {"theta": mode["theta"] + uploads["change"]}
