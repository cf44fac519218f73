"""Makes models for single clients from a trained federation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..data.client_rows import ClientRows
from ..data.federated import FederatedData
from ..errors import InputError, first_line
from ..federation.federation import Federation
from ..federation.mode_bank import ModeBank, own_models
from ..metrics import MIN_PROBABILITY
from .local_steps import train_own_models
from .result import Personalization
from .settings import TRAINING, PersonalSettings
from .weights import (
    mixture_weights,
    posterior_weights,
    regression_weights,
    select_weights,
)

_KNOWN, _NEW = 0, 1  # rounds in the keys of random numbers


def personalize(federation: Federation, method: str = "select", **settings: Any) -> Personalization:
    """Models of single clients, made from the federation's K modes; training is not changed.

    Each client receives the K modes once. It compares them on its own validation rows,
    `data.calibration`, never on test rows, and keeps the result. With a method that trains, it
    then trains on its training rows.

    - "select": the mode with the lowest loss.
    - "mix": the weights of the modes whose mixture has the lowest NLL (for regression, squared
      error), with `prior` imagined rows for equal weights.
    - "posterior": weights proportional to exp(-n * loss), for n rows with this mean loss.
    - "tune": `steps` local steps from the selected mode.
    - "head": the same, for the parameters that match a pattern in `head` only.

    A client without validation rows uses the ensemble, all modes with equal weights; with "tune"
    and "head" it starts from the mode that is best on the rows of all clients. One row and rows of
    one class are treated as any others: with one row, "mix" is held near equal weights by the
    prior.

    Clients that are not trained on (`data.new_clients`) are personalized, too: `result.new`.

    Args:
        federation: after training. If its clients have models of their own, as with "ditto" or
            personal parts, each client compares its own K models.
        method: one of the above.
        settings: of the method; see `PersonalSettings`.
    """
    if not isinstance(federation, Federation):
        raise InputError(
            f"personalize() needs a Federation; got {type(federation).__name__}. For a run of the "
            "command line, use Federation.load(folder)."
        )
    try:
        chosen = PersonalSettings(method=method, **settings)
    except TypeError as error:
        raise InputError(f"personalize(): {first_line(error)}.") from None
    data = federation.data
    if data.calibration is None and (
        data.new_clients is None or data.new_clients.calibration is None
    ):
        raise InputError(
            "personalize() needs validation rows of the clients, and these data have none: make "
            "them with FederatedData.with_calibration(0.1) before training, or set "
            "data.calibration."
        )
    ensemble = federation.uncalibrated
    compared = compare_modes(own_models(federation), data)
    best = int(compared.total.argmin())
    new = None
    if data.new_clients is not None:
        theirs = compare_modes(ModeBank(ensemble), data.new_clients)
        new = _personalize(federation, data.new_clients, theirs, chosen, best, _NEW)
    return _personalize(federation, data, compared, chosen, best, _KNOWN, new)


@dataclass(frozen=True, eq=False)
class Comparison:
    """What the validation rows of clients say about the modes."""

    bank: ModeBank
    loss: Tensor  # float64 [n, K]: NLL or squared error of each mode, for each target
    owner: Tensor  # [n]
    outputs: Tensor  # regression only: float64 [n, K, D]
    target: Tensor  # regression only: float64 [n, D]

    @property
    def total(self) -> Tensor:
        """The sum of the losses of each mode, [K]."""
        return self.loss.sum(0)


def compare_modes(bank: ModeBank, data: FederatedData) -> Comparison:
    """Evaluates the K modes on the clients' validation rows, each client its own versions."""
    ensemble, modes = bank.ensemble, len(bank)
    rows: ClientRows | None = data.calibration
    empty = torch.empty(0, dtype=torch.float64)
    if rows is None or not len(rows):
        none = torch.empty(0, dtype=torch.int64)
        return Comparison(bank, empty.reshape(0, modes), none, empty, empty)
    raw = bank.outputs(rows.x, rows.owner.cpu()).cpu()
    prediction, owner, target = ensemble._combine_outputs(raw), rows.owner.cpu(), rows.y.cpu()
    if ensemble.model.task == "regression":
        outputs = prediction.modes.double().reshape(modes, len(owner), -1).transpose(0, 1)
        target = target.double().reshape(len(owner), -1)
        loss = ((outputs - target.unsqueeze(1)) ** 2).mean(2)
        return Comparison(bank, loss, owner, outputs, target)
    # A sequence counts as its tokens.
    classes = prediction.modes.shape[-1]
    probabilities = prediction.modes.double().reshape(modes, -1, classes)
    target = target.reshape(-1).long()
    owner = owner.repeat_interleave(len(target) // len(owner))
    of_target = probabilities.gather(2, target.reshape(1, -1, 1).expand(modes, -1, 1)).squeeze(2)
    return Comparison(bank, -of_target.clamp(min=MIN_PROBABILITY).log().T, owner, empty, empty)


def _personalize(
    federation: Federation,
    data: FederatedData,
    compared: Comparison,
    settings: PersonalSettings,
    best: int,
    visit: int,
    new: Personalization | None = None,
) -> Personalization:
    """The models of one group of clients.

    Args:
        compared: their comparison of the modes.
        best: the mode that is best on the validation rows of all known clients.
        visit: the group, for random numbers.
        new: the result for new clients.
    """
    clients = len(data)
    weights = mode_weights(compared, settings, clients)
    rows = torch.zeros(clients, dtype=torch.int64)
    if data.calibration is not None:
        rows = data.calibration.sizes(clients).cpu()
    theta = buffers = None
    if settings.method in TRAINING:
        choice = torch.where(rows > 0, weights.argmax(1), best)
        weights = torch.nn.functional.one_hot(choice, weights.shape[1]).to(weights.dtype)
        start = compared.bank.start(choice.to(federation.model.device))
        theta, buffers = train_own_models(federation, data, settings, start, visit)
    return Personalization(
        method=settings.method,
        weights=weights,
        rows=rows,
        bytes_down=clients * _download(federation, compared.bank),
        bank=compared.bank,
        theta=theta,
        buffers=buffers,
        data=data,
        names=None if data.names is None else tuple(data.names),
        new=new,
    )


def mode_weights(compared: Comparison, settings: PersonalSettings, clients: int) -> Tensor:
    """The weights of the modes, float64 [N, K]; of methods that train, those of the start."""
    loss, owner = compared.loss, compared.owner
    if settings.method == "mix" and compared.target.numel():
        return regression_weights(
            compared.outputs, compared.target, owner, clients, prior=settings.prior
        ).weights
    if settings.method == "mix":
        return mixture_weights(loss, owner, clients, prior=settings.prior).weights
    if settings.method == "posterior":
        return posterior_weights(loss, owner, clients)
    return select_weights(loss, owner, clients)


def _download(federation: Federation, bank: ModeBank) -> int:
    """Bytes that a client receives: K models, what is not personal of them, or nothing."""
    if federation.personal:
        sent = federation.algorithm.broadcast(federation.state.modes)["theta"]
        statistics = federation.algorithm.buffer_bytes(federation.state.buffers)
        return len(bank) * (sent.shape[-1] * sent.element_size() + statistics)
    # Models of their own are with the clients already.
    return bank.ensemble.prediction_bytes if bank.theta is None else 0
