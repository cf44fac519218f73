"""Schemas for tables whose keys depend on a name: what a plug-in's own signature takes, checked by
pydantic.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

Parameter = tuple[Any, Any]  # type and default, `...` where there is none


class Table(BaseModel):
    """A table of the config: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


def parameters(plug_in: Callable[..., Any], given: Collection[str] = ()) -> dict[str, Parameter]:
    """Names, types and defaults of what a function or class takes, without what it is `given` in
    another way.
    """
    call = plug_in.__init__ if inspect.isclass(plug_in) else plug_in
    hints = get_type_hints(call)
    taken = {}
    for name, parameter in inspect.signature(plug_in).parameters.items():
        if name in given or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        default = ... if parameter.default is parameter.empty else parameter.default
        taken[name] = (hints.get(name, Any), default)
    return taken


def schema(title: str, known: dict[str, Parameter]) -> type[Table]:
    """A table with these keys."""
    shown: dict[str, Any] = {n: (kind, Field(default=d)) for n, (kind, d) in known.items()}
    return create_model(title, __base__=Table, **shown)


def field_parameters(chosen: Callable[..., Any]) -> dict[str, Parameter]:
    """As `parameters`, and of a dataclass its fields, which may come from several modules."""
    if not is_dataclass(chosen):
        return parameters(chosen)
    hints = get_type_hints(chosen)
    return {f.name: (hints[f.name], f.default) for f in fields(chosen) if f.init}
