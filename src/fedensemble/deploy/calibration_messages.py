"""Messages after the last round: the models, once, then queries and answers.

They are those of a calibration, see `uncertainty`, and of personal models, see `fleet_personal`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from torch import Tensor

from ..engines.flower.messages import MODEL, UPLOAD, UnreadableError, build_reply, pack
from ..errors import InputError
from ..flat_params import Tree
from ..text import shorten
from ..uncertainty.calibration_client import Query
from ..uncertainty.conformal_threshold import BINS
from ..uncertainty.temperature import LOG_TEMPERATURES, SUMS

QUERY, PROBLEM = "query", "problem"  # names of records
MODELS_KIND = "models"  # of the first query, which brings the models
PREDICTORS, STATISTICS = "predictors", "statistics"  # names of the models' tensors
# Where a mode predicts with several models: their center, from which personal training starts.
CENTER, CENTER_STATISTICS = "center", "center statistics"
PERSONAL_KIND = "personal"  # of queries for personal models
# in the answer to it: sums of losses and of correct predictions, of losses of each mode; weights
SUMS_OF, MODE_LOSSES, WEIGHTS = "sums", "mode losses", "weights"
ROWS, LABELS = "rows", "labels"  # in the answer to the first query
_KINDS = ("temperature", "nll", "range", "histogram", "threshold", "uncertainty")
_MOST_TEXT = 100_000  # characters of a query
# Bounds of plausible sums per label. An NLL of 10,000 would be a probability of e^-10000.
MOST_SUM = 1e6


class Session(NamedTuple):
    """What a server's queries belong to: a training, and one set of models of it."""

    training: str
    models: str  # id of the set of models; a new one for every calibration


def build_query(
    session: Session, query: Query, node: int, ttl: float, models: Any = None
) -> Message:
    """Returns the message that asks a client a query, with the models in the first one."""
    text = ConfigRecord({**session._asdict(), QUERY: json.dumps(dict(query))})
    content = RecordDict({QUERY: text} if models is None else {QUERY: text, MODEL: models})
    return Message(content, node, MessageType.EVALUATE, ttl=ttl, group_id="calibration")


def read_query(content: RecordDict) -> tuple[Session, dict[str, Any]]:
    """Returns the query in a message; raises InputError if it is none."""
    record = content.config_records.get(QUERY)
    values = {} if record is None else dict(record)
    texts = [values.get(name) for name in (*Session._fields, QUERY)]
    if not all(isinstance(text, str) for text in texts) or len(str(texts[-1])) > _MOST_TEXT:
        raise InputError("The server's message is no query of a calibration.")
    training, models, text = map(str, texts)
    if not all(re.fullmatch(r"[0-9a-zA-Z-]{1,64}", name) for name in (training, models)):
        raise InputError("The server's query has an id with other characters than letters.")
    try:
        query = json.loads(text)
    except (ValueError, RecursionError):
        query = None
    if not isinstance(query, dict):
        raise InputError("The server's query is no table.")
    return Session(training, models), query


def build_answer(message: Message, answer: Mapping[str, Tensor]) -> Message:
    """Returns the reply with an answer."""
    return build_reply(message, {UPLOAD: pack(answer)})


def build_problem(message: Message, problem: str) -> Message:
    """Returns the reply of a client that cannot answer."""
    return build_reply(message, {PROBLEM: ConfigRecord({PROBLEM: shorten(problem)})})


def read_problem(content: RecordDict) -> str | None:
    """Returns why a client cannot answer, or None if it does."""
    record = content.config_records.get(PROBLEM)
    return None if record is None else str(record.get(PROBLEM))


def expected_answer(query: Query, modes: int) -> Tree:
    """Returns tensors of the names, shapes and dtypes that the answer to a query has."""

    def counts(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    def sums(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.double)

    kind = query["kind"]
    if kind == MODELS_KIND:
        return {ROWS: counts(1), LABELS: counts(1)}
    if kind == PERSONAL_KIND:
        # The first row of sums is that of all modes with equal weights.
        methods = query["methods"]
        tensors = {ROWS: counts(1), LABELS: counts(1), SUMS_OF: sums(len(methods) + 1, 2)}
        tensors |= {MODE_LOSSES: sums(modes)} if query["ask_losses"] else {}
        return tensors | ({WEIGHTS: sums(len(methods), modes)} if query["ask_weights"] else {})
    if kind == "temperature":
        table = (len(LOG_TEMPERATURES), SUMS)
        members = {"member": sums(modes, *table)} if query["member"] else {}
        return {"count": counts(1), "mean": sums(*table), **members}
    if kind in ("histogram", "uncertainty"):
        groups = 2 if kind == "uncertainty" else len(query["lower"])
        return {"counts": counts(groups, query["bins"])}
    if kind == "nll":
        return {"nll": sums(4)}
    return {{"range": "reach", "threshold": "threshold"}[kind]: sums(1)}


def check_answer(query: Query, answer: Tree, rows: int, labels: int) -> None:
    """Raises UnreadableError unless the values of an answer are possible.

    A client can still lie about its own rows; it cannot count more than it has.

    Args:
        query: that was asked.
        answer: with the names, shapes and dtypes of `expected_answer`.
        rows, labels: number of calibration rows and of their labels that the client claims.
    """
    kind = query["kind"]
    for name, value in answer.items():
        if value.is_floating_point():
            if not bool(value.isfinite().all()):
                raise UnreadableError(f"'{name}' has values that are not finite")
            if kind in ("temperature", "nll") and float(value.abs().max()) > MOST_SUM * labels:
                raise UnreadableError(f"'{name}' has sums that {labels} labels cannot have")
            if kind == "range" and float(value.min()) < 0:
                raise UnreadableError(f"'{name}' is negative")
            if kind == "threshold" and not query["lower"][0] <= float(value) <= query["upper"][0]:
                raise UnreadableError(f"'{name}' is outside of the range of scores")
        else:
            most = labels if kind in ("temperature", "uncertainty") else rows
            if int(value.min()) < 0 or int(value.long().sum()) > most:
                raise UnreadableError(f"'{name}' counts other rows than the {most} there are")


def check_query(query: Mapping[str, Any], modes: int, classes: int) -> None:
    """Raises InputError if a query has values that no calibration has; before it is answered.

    Args:
        query: that the server asks.
        modes: number of modes.
        classes: outputs of the model per row.
    """
    number = (int, float)
    temperatures = query.get("temperatures", [])
    lists = [query.get(name, []) for name in ("lower", "upper", "pool")]
    ends = [value for values in lists if isinstance(values, list) for value in values]
    bins = query.get("bins", 1)
    fits = (
        query.get("kind") in _KINDS
        and isinstance(temperatures, list)
        and len(temperatures) in (0, 1, modes)
        and all(type(value) in number and 0 < value < 1e6 for value in temperatures)
        and all(isinstance(values, list) for values in lists)
        and len(lists[0]) == len(lists[1]) <= max(classes, 1)
        and len(lists[2]) <= BINS
        and all(type(value) in number and abs(value) < 1e300 for value in ends)
        and type(bins) is int
        and 0 < bins * max(len(lists[0]), 1) <= BINS
    )
    if not fits:
        raise InputError("The server asks a query that no calibration has.")
