"""The server's own examples, on which a fleet's ensemble is tested."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from ..data.checks import check_examples, check_lengths
from ..errors import InputError
from .app_spec import AppSpec
from .site_files import read_examples


class ServerTestSet(NamedTuple):
    """The server's own examples; None and None without a test set."""

    x_test: Tensor | None
    y_test: Tensor | None
    classes: int | None


def read_test_set(spec: AppSpec, file: str) -> ServerTestSet:
    """Returns the examples in the file of the run's setting `test-file`."""
    if not file:
        return ServerTestSet(None, None, spec.classes)
    path = Path(file).expanduser()
    try:
        x, y = spec.convert(read_examples(path, spec.schema), str(path))
    except OSError as error:
        raise InputError(
            f"The run's setting `test-file` names {path}, which the server cannot read: "
            f"{error.strerror}. Give an absolute path on the server."
        ) from None
    check_lengths(x, y, str(path))
    check_examples(x, y, str(path), spec.classes)
    return ServerTestSet(x, y, spec.classes)
