"""FedSDD: the server distils the ensemble of K models into one of them.

Client:  w_i = local SGD from its mode's model.
Server:  w_k = sum_i p_i w_i / sum_i p_i over the clients of mode k;
         teacher(x) = softmax(mean of f(x; .) / T), over the K models and those after each mode's
         last R - 1 rounds, on unlabelled server data;
         w_0 <- SGD from w_0 on T^2 times the cross-entropy between the teacher and
         softmax(f(x; w_0) / T); the models 1 to K - 1 stay as they are, and so stay diverse.
Deployed: the main model w_0.

Reference: Kwan, Song, "FedSDD: scalable and diversity-enhanced distillation for model aggregation
in federated learning", arXiv 2312.17029, 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.algorithm import algorithms
from ...core.types import Cohort
from ...errors import InputError
from ...flat_params import Tree
from ...modeling.server_context import Objective
from ..fedavg import FedAvg
from .distillation import ServerDistillation, soft_cross_entropy, train_students

# Server state: "seen" [K, 1] is the number of rounds in which a mode had clients, up to R. The rest
# has R - 1 slots, the newest model first: "past" [K, (R - 1) P] and "past_buffers", the running
# statistics, if the model has any.
_SEEN, _PAST, _PAST_BUFFERS = "seen", "past", "past_buffers"


@algorithms.register("fedsdd")
@dataclass(frozen=True, kw_only=True)
class FedSDD(ServerDistillation, FedAvg):
    """FedAvg of K models whose ensemble teaches one of them, the main model, on the server.

    The server needs unlabelled inputs. Models are evaluated on them as in prediction: running
    statistics stay the mean of the clients' statistics, and dropout is off. For regression, the
    teacher is the mean output and the loss is the squared error.

    The main model is distilled in every round in which some client replied, also if it had no
    clients itself. A mode without clients teaches with its newest model; before its first clients,
    it does not teach.

    Args:
        history: R, the models of each mode in the teacher (temporal ensembling): the current one
            and those after the last R - 1 rounds in which the mode had clients. 1 keeps none; the
            server's state grows by R - 1 models per mode.
        server_epochs: passes over the server's data per round.
        server_batch: batch size on the server.
        server_lr: learning rate on the server; momentum is 0.9.
        temperature: T, of teacher and student.
        deploy: what predicts: the "main" model, or the "ensemble" of the K models.
    """

    reference = "Kwan and Song 2023"

    history: int = 2
    server_epochs: int = 5
    server_batch: int = 128
    server_lr: float = 0.01
    temperature: float = 4.0
    deploy: Literal["main", "ensemble"] = "main"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("history", "server_epochs", "server_batch"):
            if getattr(self, name) < 1:
                raise InputError(f"FedSDD needs {name} >= 1; got {getattr(self, name)}.")
        for name in ("server_lr", "temperature"):
            if not getattr(self, name) > 0:
                raise InputError(f"FedSDD needs {name} > 0; got {getattr(self, name)}.")
        if self.deploy not in ("main", "ensemble"):
            raise InputError(f"FedSDD needs deploy 'main' or 'ensemble'; got {self.deploy!r}.")

    def init_mode(self, theta: Tensor) -> Tree:
        state = {"theta": theta, _SEEN: torch.zeros_like(theta[..., :1])}
        slots = self.history - 1
        if slots:
            state[_PAST] = torch.cat([theta] * slots, -1)
            statistics = 0 if self.context is None else self.context.model.buffer_layout.total
            if statistics:
                state[_PAST_BUFFERS] = theta.new_zeros(*theta.shape[:-1], slots * statistics)
        return state

    def server_update(self, mode: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        # `couple` writes the rest: it knows the model that the clients will receive.
        return {**mode, "theta": uploads["theta"]}

    def couple(self, modes: Tree, buffers: Tensor, cohort: Cohort) -> tuple[Tree, Tensor]:
        trained = cohort.count > 0
        theta, teaches, statistics = self._teachers(modes, buffers, trained)
        main = modes["theta"][:1]
        # Alone, the main model would only teach itself what it knows.
        if bool(teaches[1:].any()):
            main = self._distil(main, buffers[:1], theta[teaches], statistics[teaches], cohort)
        theta = torch.cat([main, modes["theta"][1:]])
        return self._remember({**modes, "theta": theta}, buffers, trained), buffers

    def _teachers(
        self, modes: Tree, buffers: Tensor, trained: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """All K R models, the main model first, which of them teach, and their statistics."""
        theta, slots = modes["theta"], self.history - 1
        seen, newest = modes[_SEEN], torch.arange(slots, device=theta.device)
        # The newest stored model of a mode without clients is its current one and counts once. (The
        # main model may have been distilled since; then the newer one counts.)
        stored = (newest < seen) & (trained | (newest > 0))
        teaches = torch.cat([trained | (seen > 0), stored], 1).T.flatten()
        past, past_buffers = modes.get(_PAST), modes.get(_PAST_BUFFERS)
        return _by_age(theta, past), teaches, _by_age(buffers, past_buffers, 1 + slots)

    def _distil(
        self, main: Tensor, buffers: Tensor, teachers: Tensor, statistics: Tensor, cohort: Cohort
    ) -> Tensor:
        """The main model [1, P] after it has learned from the teachers, [T, P] and [T, R]."""
        context, x = self.server_inputs()
        weights = main.new_full((1, len(teachers)), 1 / len(teachers))
        teacher = context.mixture_of_predictions(weights, teachers, statistics, logits=True)
        objective: Objective = F.mse_loss
        if context.model.task == "classification":
            teacher = (teacher / self.temperature).softmax(-1)
            objective = soft_cross_entropy(self.temperature)
        for student in train_students(
            context,
            objective,
            main,
            buffers,
            x,
            teacher,
            cohort.key(1)[:1],
            epochs=self.server_epochs,
            batch_size=self.server_batch,
            learning_rate=lambda step: self.server_lr,
        ):
            main = student
        return main

    def _remember(self, modes: Tree, buffers: Tensor, trained: Tensor) -> Tree:
        """The state with the current models in the first slots of the modes that had clients."""
        seen = torch.where(trained, (modes[_SEEN] + 1).clamp(max=self.history), modes[_SEEN])
        state = {**modes, _SEEN: seen}
        for name, newest in ((_PAST, modes["theta"]), (_PAST_BUFFERS, buffers)):
            if name in modes:
                shifted = torch.cat([newest, modes[name]], 1)[:, : modes[name].shape[1]]
                state[name] = torch.where(trained, shifted, modes[name])
        return state

    def deployed_modes(self, modes: Tree, buffers: Tensor) -> tuple[Tree, Tensor]:
        if self.deploy == "ensemble":
            return modes, buffers
        return {name: value[:1] for name, value in modes.items()}, buffers[:1]


def _by_age(current: Tensor, past: Tensor | None, ages: int = 1) -> Tensor:
    """The rows [K, P], then those of each slot of the past [K, (R - 1) P]: [R K, P].

    Args:
        ages: R, where there is no past because a row has no elements.
    """
    if past is None:
        return current.repeat(ages, 1)
    return torch.cat([current, *torch.split(past, current.shape[1], 1)])
