"""Pydantic schemas of tables whose keys are the parameters of a plug-in."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

Parameter = tuple[Any, Any]  # type and default; the default is `...` if the parameter is required


class Table(BaseModel):
    """A table of the config; unknown keys are rejected."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


def table_class(annotation: Any) -> type[Table] | None:
    """Returns the class of a field that holds a table, or None; a table may be optional."""
    optional = get_args(annotation) if type(None) in get_args(annotation) else ()
    for kind in (annotation, *optional):
        if isinstance(kind, type) and issubclass(kind, Table):
            return kind
    return None


def parameters(plug_in: Callable[..., Any], exclude: Collection[str] = ()) -> dict[str, Parameter]:
    """Returns the type and the default of each parameter of a function or class.

    Args:
        exclude: parameters that are not options, because the caller passes them.
    """
    return {name: kind for name, kind in _parameters(plug_in).items() if name not in exclude}


@lru_cache  # a search checks thousands of configs with the same plug-ins
def _parameters(plug_in: Callable[..., Any]) -> dict[str, Parameter]:
    function = plug_in.__init__ if inspect.isclass(plug_in) else plug_in
    hints = get_type_hints(function)
    options = {}
    for name, parameter in inspect.signature(plug_in).parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        default = ... if parameter.default is parameter.empty else parameter.default
        options[name] = (hints.get(name, Any), default)
    return options


def schema(title: str, options: dict[str, Parameter]) -> type[Table]:
    """Returns a table class with these keys."""
    fields_by_name: dict[str, Any] = {
        name: (kind, Field(default=default)) for name, (kind, default) in options.items()
    }
    return create_model(title, __base__=Table, **fields_by_name)


def field_parameters(plug_in: Callable[..., Any]) -> dict[str, Parameter]:
    """Returns the fields of a dataclass, or the parameters of another function or class."""
    # The hints of the generated __init__ of a dataclass are resolved in the module of the class,
    # which need not know the types of inherited fields. The hints of the class are resolved in the
    # module of each base class.
    if not is_dataclass(plug_in):
        return parameters(plug_in)
    hints = get_type_hints(plug_in)
    return {f.name: (hints[f.name], f.default) for f in fields(plug_in) if f.init}
