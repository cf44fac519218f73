"""Registered models: built from a name and options, and described by them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..arguments import check_names
from ..data.federated import FederatedData
from ..data.labels.label_checks import advise_labels
from ..errors import DataError, InputError
from ..modeling.factory import ModelFactory, ModelSpec
from ..modeling.losses import Loss, count_outputs
from ..models import models

# Parameters that a registered model gets from the data, so that they are not options.
GIVEN_TO_MODELS = ("shape", "outputs")


def model_facts(data: FederatedData, loss: str | Loss) -> dict[str, Any]:
    """What a model needs to know of the data: shape of an input, number of outputs."""
    if loss == "mse" or (callable(loss) and data.classes is None):
        outputs = int(data.y[0].numel())
    elif data.classes is not None:
        outputs = count_outputs(str(loss), data.classes)
    else:
        advice = advise_labels(data.y) or 'For regression set training.loss = "mse".'
        raise DataError(f"Loss '{loss}' needs integer labels, and the targets are floats. {advice}")
    return {"shape": list(data.x.shape[1:]), "outputs": outputs}


def build_model(table: Mapping[str, Any], facts: Mapping[str, Any]) -> ModelSpec:
    """A callable that makes a new registered model on each call.

    Args:
        table: the model's name and options, as `[model]` of a config.
        facts: from `model_facts`.
    """
    model_class = models[table["name"]]
    options = {name: value for name, value in table.items() if name != "name"}
    return ModelSpec(model_class, {**options, **given_by_data(model_class, facts)})


def resolve_model(
    model: ModelFactory | str | Mapping[str, Any], data: FederatedData, loss: str | Loss
) -> ModelFactory:
    """The model's factory; a name gives its default options, a dict has its name and options."""
    if not isinstance(model, (str, Mapping)):
        return model
    table = {"name": model} if isinstance(model, str) else dict(model)
    if "name" not in table:
        raise InputError(
            f"A dict that describes the model needs its name, such as {{'name': 'mlp'}}; "
            f"got {table!r}."
        )
    options = {name: value for name, value in table.items() if name != "name"}
    check_names(f"model '{table['name']}'", models[table["name"]], options, given=GIVEN_TO_MODELS)
    return build_model(table, model_facts(data, loss))


def ask_for_facts(
    model: ModelFactory | str | Mapping[str, Any], data: FederatedData, loss: str | Loss
) -> ModelFactory | str | Mapping[str, Any]:
    """The model, or a factory that passes shape and outputs on to a callable that takes them.

    >>> from torch import nn
    >>> data = FederatedData.from_clients([([[0.0, 1.0]], [0]), ([[1.0, 1.0]], [1])])
    >>> ask_for_facts(lambda outputs: nn.Linear(2, outputs), data, "cross_entropy")()
    Linear(in_features=2, out_features=2, bias=True)
    """
    if isinstance(model, (str, Mapping)) or not callable(model):
        return model  # `Federation` says what is wrong with anything that is no model
    given = given_by_data(model, model_facts(data, loss))
    return ModelSpec(model, given) if given else model


def describe_model(factory: ModelFactory, facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """The `[model]` table from which `build_model` makes the same model; None if there is none.

    A registered class has one, also as `partial(Class, option=...)`, unless it takes the shape or
    the number of outputs from the data and was given others.
    """
    if isinstance(factory, ModelSpec):
        made, options = factory.model, factory.options
    elif isinstance(factory, partial) and not factory.args:
        made, options = factory.func, dict(factory.keywords)
    else:
        made, options = factory, {}
    name = models.name_of(made)
    if name is None:
        return None
    given = given_by_data(made, facts)
    if any(_as_list(options.get(key)) != value for key, value in given.items()):
        return None
    return {"name": name, **{key: v for key, v in options.items() if key not in given}}


def given_by_data(model: Callable[..., Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that a registered model takes."""
    accepted = inspect.signature(model).parameters
    return {name: facts[name] for name in GIVEN_TO_MODELS if name in accepted}


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else value
