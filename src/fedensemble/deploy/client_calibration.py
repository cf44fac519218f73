"""A client's part of a calibration: keeps its outputs of the models, and answers by sums."""

from __future__ import annotations

from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message

from ..engines.flower.client import LocalClient
from ..engines.flower.messages import MODEL, UnreadableError, pack, unpack
from ..errors import FedEnsembleError, InputError
from ..predict import Ensemble
from ..uncertainty.calibration_client import CalibrationClient, rows_salt
from .app_spec import AppSpec
from .calibration_messages import (
    CENTER,
    CENTER_STATISTICS,
    LABELS,
    MODELS_KIND,
    PERSONAL_KIND,
    PREDICTORS,
    ROWS,
    STATISTICS,
    Session,
    build_answer,
    build_problem,
    check_query,
    read_query,
)
from .client_personal import make_personal_models

_OUTPUTS, _SESSION = "calibration outputs", "calibration session"  # in the state of the node


def answer_query(message: Message, context: Context, spec: AppSpec, client: LocalClient) -> Message:
    """Returns the reply to a query of a calibration, or for personal models.

    The outputs stay in `context.state` between queries, so that the models are sent once.
    """
    try:
        session, query = read_query(message.content)
        if query.get("kind") == MODELS_KIND:
            return build_answer(message, _keep_outputs(message, context, session, spec, client))
        if query.get("kind") == PERSONAL_KIND:
            models = _read_models(message, spec, client) if MODEL in message.content else None
            return build_answer(
                message, make_personal_models(models, session, query, context, spec, client)
            )
        rows = _restore_rows(context, session, query, spec, client)
        return build_answer(message, rows.answer(query))
    except (FedEnsembleError, UnreadableError) as error:
        return build_problem(message, str(error))
    except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        # The query has another form than those of this version.
        return build_problem(message, f"the query cannot be answered: {type(error).__name__}")


def _keep_outputs(
    message: Message, context: Context, session: Session, spec: AppSpec, client: LocalClient
) -> dict[str, torch.Tensor]:
    """Evaluates the models on the calibration rows; returns how many there are."""
    held = client.data.calibration
    count = {ROWS: 0, LABELS: 0}
    if held is not None and len(held):
        outputs = _read_models(message, spec, client).outputs(held.x).cpu()
        context.state[_OUTPUTS] = pack({"outputs": outputs})
        context.state[_SESSION] = ConfigRecord({**session._asdict()})
        count = {ROWS: len(held), LABELS: held.y.numel()}
    return {name: torch.tensor([value], dtype=torch.int32) for name, value in count.items()}


def _read_models(message: Message, spec: AppSpec, client: LocalClient) -> Ensemble:
    """Returns the models in a message as an ensemble."""
    model = client.model
    tensors = {name: v.to(model.device) for name, v in unpack(message.content, MODEL).items()}
    predictors = tensors[PREDICTORS]
    statistics = tensors.get(STATISTICS, predictors.new_empty(*predictors.shape[:2], 0))
    center = tensors.get(CENTER, predictors[:, 0])
    center_statistics = tensors.get(CENTER_STATISTICS, statistics[:, 0])
    sizes = (model.theta_layout.total, model.buffer_layout.total)
    if (
        (predictors.shape[-1], statistics.shape[-1]) != sizes
        or predictors.dim() != 3
        or center.shape != predictors[:, 0].shape
        or center_statistics.shape != statistics[:, 0].shape
    ):
        raise InputError("The server's models have other parameters than this app's model.")
    return Ensemble(
        model,
        center,
        center_statistics,
        predictors=predictors,
        predictor_buffers=statistics,
        standardise=spec.schema.standardise,
        combine=spec.config.ensemble.combine,
        input_shape=spec.shape,
        seed=spec.config.seed,
        tokens=spec.schema.tokens,
        class_names=spec.class_names,
        feature_names=spec.schema.columns,
        dropout_samples=spec.config.ensemble.dropout_samples or 0,
    )


def _restore_rows(
    context: Context, session: Session, query: dict[str, Any], spec: AppSpec, client: LocalClient
) -> CalibrationClient:
    """Returns the calibration rows with the outputs that were kept for these models."""
    held, kept = client.data.calibration, context.state.config_records.get(_SESSION)
    if held is None or kept is None or dict(kept) != session._asdict():
        raise InputError("This client was restarted since it got the models.")
    outputs = unpack(context.state, _OUTPUTS)["outputs"]
    check_query(query, len(outputs), outputs.shape[-1])
    by_logits = spec.config.ensemble.combine == "logits"
    salt = rows_salt(held.x)
    return CalibrationClient(outputs, held.y.cpu(), by_logits, spec.config.seed, salt)
