"""A client's part of personal models: compares the modes on its rows, and keeps what it chooses.

The models are kept as a run folder of this client alone, in its `memory-dir`, so that the
command `fedensemble predict` uses them. They outlive the node's process; only the user who runs
the node may read them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from flwr.app import Context
from torch import Tensor

from ..data.federated import FederatedData
from ..engines.flower.client import LocalClient, check_visit
from ..engines.flower.client_state import ClientStateStore
from ..engines.flower.messages import Visit
from ..errors import InputError
from ..experiment.storage.ensemble_file import read_ensemble, write_modes
from ..experiment.storage.run_folder import RunFolder
from ..federation.mode_bank import ModeBank
from ..metrics import MIN_PROBABILITY
from ..personal.local_steps import OwnTraining, local_steps
from ..personal.personalize import Comparison, compare_modes, mode_weights
from ..personal.result import Personalization
from ..personal.settings import TRAINING, PersonalSettings
from ..predict import Ensemble
from ..prediction import Prediction
from .app_spec import AppSpec
from .calibration_messages import LABELS, MODE_LOSSES, ROWS, SUMS_OF, WEIGHTS, Session

logger = logging.getLogger("flwr")  # Flower shows this logger
FOLDER = "personal"  # in `memory-dir`


def make_personal_models(
    models: Ensemble | None,
    session: Session,
    query: Mapping[str, Any],
    context: Context,
    spec: AppSpec,
    client: LocalClient,
) -> dict[str, Tensor]:
    """Makes and keeps the models of `[personalize]`; returns the answer to the query.

    Args:
        models: the K modes. None in a second query, to clients without calibration rows: it says
            which mode is best on the rows of all clients, and the modes are those kept before.
    """
    config, device = spec.config, client.model.device
    if config.personalize is None:
        raise InputError("The app's config has no table [personalize].")
    visit = _read_visit(session, query)
    store = _open_folder(context, config.name, session)
    store.claim(config)
    try:
        if models is None:
            models = read_ensemble(store.modes_file, config, device)
        else:
            write_modes(store.modes_file, models, {"model": spec.model})
        maker = _Maker(models, visit, spec, client)
        made = {each.method: maker.make(each) for each in config.personalize.settings()}
        for result in made.values():
            if result is not None:
                result.save(store.path)
        store.finish(
            {
                "name": config.name,
                "hash": config.hash(),
                "rounds": config.rounds,
                "modes": len(models),
                "parameters": client.model.theta_layout.total,
                "task": client.model.task,
                "bytes_up": 0,
                "bytes_down": models.prediction_bytes,
            }
        )
    finally:
        store.release()
    logger.info(
        "The personal models are in %s. To predict: fedensemble predict %s inputs.npz "
        "--personal %s --client 0 -o out.npz",
        store.path,
        store.path,
        next(iter(made)),
    )
    return _answer(maker.compared, made, client.data, publish=config.report.publish_clients)


def _read_visit(session: Session, query: Mapping[str, Any]) -> Visit:
    """Returns who this client is, as the random numbers of its local steps need it.

    The mode is the one to start from without calibration rows, or -1 in the first query.
    """
    values = [query.get(name) for name in ("client", "largest", "start")]
    if any(type(value) is not int for value in values):
        raise InputError("The server's query does not say which client this is.")
    client, largest, start = values
    # Personal models of a simulation are those of round 0, whatever the number of rounds.
    visit = Visit(session.training, 0, client, start, -1, largest)  # type: ignore[arg-type]
    check_visit(visit._replace(mode=max(visit.mode, 0)))
    return visit


def _open_folder(context: Context, name: str, session: Session) -> RunFolder:
    """Returns this client's folder for the models of a training."""
    store = ClientStateStore.from_context(context)
    if store.folder is None:
        raise InputError("it has no memory-dir in its --node-config to keep a personal model in")
    store.create_private_folder(FOLDER)
    return RunFolder(store.create_private_folder(f"{FOLDER}/{name}-{session.training}"))


class _Maker:
    """Makes this client's models by several methods, from one comparison of the modes."""

    def __init__(self, models: Ensemble, visit: Visit, spec: AppSpec, client: LocalClient) -> None:
        self.visit, self.client, self.spec = visit, client, spec
        self.compared: Comparison = compare_modes(ModeBank(models), client.data)
        held = client.data.calibration
        self.rows = 0 if held is None else len(held)

    def make(self, settings: PersonalSettings) -> Personalization | None:
        """Returns the model of one method; None if it does not know yet where to start."""
        weights, theta, buffers = mode_weights(self.compared, settings, 1), None, None
        if settings.method in TRAINING:
            mode = int(weights.argmax()) if self.rows else self.visit.mode
            if not 0 <= mode < weights.shape[1]:
                return None
            weights = torch.zeros_like(weights)
            weights[0, mode] = 1.0
            theta, buffers = self._train(settings, mode)
        bank = self.compared.bank
        return Personalization(
            method=settings.method,
            weights=weights,
            rows=torch.tensor([self.rows]),
            bytes_down=bank.ensemble.prediction_bytes,
            bank=bank,
            theta=theta,
            buffers=buffers,
        )

    def _train(self, settings: PersonalSettings, mode: int) -> tuple[Tensor, Tensor]:
        """Returns parameters [1, P] and running statistics [1, R] after the local steps."""
        client, models = self.client, self.compared.bank.ensemble
        own = LocalClient(
            client.model,
            OwnTraining.of(settings, client.algorithm, self.spec.config.rounds, client.model),
            client.data,
            local_steps(settings, client.work, self.visit.largest),
            client.seed,
        )
        visit = self.visit._replace(mode=mode)
        _, result, _ = own.run_visit(
            visit, {"theta": models.theta[mode]}, models.buffers[mode], None
        )
        if not bool(result.memory["personal"].isfinite().all()):
            raise InputError(f"its model of method '{settings.method}' diverged; lower lr")
        return result.memory["personal"], result.memory["statistics"]


def _answer(
    compared: Comparison,
    made: Mapping[str, Personalization | None],
    data: FederatedData,
    *,
    publish: bool,
) -> dict[str, Tensor]:
    """The sums that the server asks for; weights only if the config publishes single clients."""
    held, modes = data.calibration, len(compared.bank)
    rows = 0 if held is None else len(held)
    labels = 0 if held is None else held.y.numel()
    sums = torch.zeros(len(made) + 1, 2, dtype=torch.double)
    if held is not None and rows:
        ensemble = compared.bank.ensemble
        sums[0] = _sums(ensemble.predict(held.x), held.y)
        for row, result in enumerate(made.values(), 1):
            assert result is not None  # a client with rows knows where to start
            sums[row] = _sums(result.predict(held.x, 0), held.y)
    answer = {
        ROWS: torch.tensor([rows], dtype=torch.int32),
        LABELS: torch.tensor([labels], dtype=torch.int32),
        SUMS_OF: sums,
    }
    if any(method in TRAINING for method in made):
        answer[MODE_LOSSES] = compared.total
    if publish:
        none = torch.zeros(modes, dtype=torch.double)
        answer[WEIGHTS] = torch.stack(
            [none if result is None else result.weights[0] for result in made.values()]
        )
    return answer


def _sums(prediction: Prediction, target: Tensor) -> Tensor:
    """The sum of losses and the number of correct labels, [2]."""
    mean, target = prediction.mean.double().cpu(), target.cpu()
    if prediction.task == "regression":
        difference = mean.reshape(-1) - target.double().reshape(-1)
        return torch.stack([(difference**2).sum(), difference.new_zeros(())])
    log_p = mean.clamp(min=MIN_PROBABILITY).log()
    loss = -log_p.gather(-1, target.long().unsqueeze(-1)).sum()
    return torch.stack([loss, (mean.argmax(-1) == target).double().sum()])
