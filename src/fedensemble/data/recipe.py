"""The recipe of data: the `[data]` table of a config that makes the same data again.

Data from `load` and `partition`, or from a config, have one. Data that were made in any other way
have none. With a recipe, the command line continues training that was begun in Python.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Recipe = Mapping[str, Any]
_T = TypeVar("_T")


def with_recipe(data: _T, recipe: Recipe | None) -> _T:
    """The same object, of which the caller is the only user, with its recipe.

    It is set in place, because `dataclasses.replace` would check all examples for a second time.
    """
    object.__setattr__(data, "recipe", None if recipe is None else dict(recipe))
    return data


def extend_recipe(recipe: Recipe | None, key: str, value: Any, seed: int) -> Recipe | None:
    """The recipe with one more setting; None if a config cannot say the same.

    Args:
        seed: with which the data were changed; a config has one seed for all of `[data]`.
    """
    return {**recipe, key: value} if recipe and recipe.get("seed", 0) == seed else None


def partition_recipe(
    source: Recipe | None,
    load: Callable[..., Any] | None,
    name: str,
    clients: int | None,
    seed: int,
    options: Recipe,
) -> dict[str, Any] | None:
    """The recipe of a dataset divided among clients; None if a config cannot say the same.

    A config passes an option to the dataset and to the partition if both accept it, `seed` above
    all. There is no recipe if they got different values.

    Args:
        source: recipe of the dataset.
        load: function that makes the dataset.
        name: of the partition, which got the other arguments.
    """
    if source is None or load is None:
        return None
    accepted = inspect.signature(load).parameters
    for key, value in {**options, "seed": seed}.items():
        if key in accepted and source.get(key, accepted[key].default) != value:
            return None
    given = {} if clients is None else {"clients": clients}
    return {**source, "partition": name, **given, "seed": seed, **options}
