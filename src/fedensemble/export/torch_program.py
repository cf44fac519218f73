"""Traces an ensemble with torch.export; the result is what a .pt2 file holds."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from ..errors import InputError, first_line
from ..runtime.oom import out_of_memory
from .inference_module import InferenceModule

FACTS_FILE = "fedensemble.json"  # extra file in the .pt2 archive


def trace(module: InferenceModule, examples: Tensor) -> ExportedProgram:
    """The module as a graph for any number of inputs; raises InputError if it has none."""
    # Tracing (not strict) takes len(x) for a constant, which the analysis of Python's bytecode
    # (strict) follows. It is slower, and supports fewer modules.
    reasons = []
    for strict in (False, True):
        try:
            with warnings.catch_warnings():
                # torch warns of deprecated parts of its own, and of the weight lists of LSTMs.
                warnings.simplefilter("ignore")
                return torch.export.export(
                    module, (examples,), dynamic_shapes=({0: Dim("batch")},), strict=strict
                )
        except Exception as error:  # a user's module, and torch.export, may raise anything
            if out_of_memory(error):
                raise
            reasons.append(error)
            if not _fixes_batch(error):
                break
    name = type(module.models[0]).__name__
    raise InputError(f"{name} cannot be exported: {_reason(reasons[0])}") from reasons[0]


def _fixes_batch(error: Exception) -> bool:
    return "batch" in str(error) and "specialized" in str(error)


def _reason(error: Exception) -> str:
    """What keeps a model from being exported, and what to do."""
    text = str(error)
    if "data-dependent" in text:
        return (
            "its forward() decides by the values of tensors (`if`, a loop, .item()), which a file "
            "cannot. Use torch.where instead, or predict in Python with fedensemble.load_ensemble."
        )
    if _fixes_batch(error):
        return (
            "its forward() does something else for another number of inputs. Use flatten(1) or "
            "reshape(x.shape[0], -1) instead of a number, and no `if` on the number of inputs."
        )
    return (
        f"torch.export raises {type(error).__name__}: {first_line(error)[:300]}. Replace that part "
        "of forward(), distil the ensemble into another model (Ensemble.distill), or predict in "
        "Python with fedensemble.load_ensemble."
    )


def to_bytes(program: ExportedProgram, facts: Mapping[str, object]) -> bytes:
    """The content of a .pt2 file; `facts` are its extra file `fedensemble.json`."""
    content = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(program, content, extra_files={FACTS_FILE: json.dumps(facts)})
    return content.getvalue()


def load(content: bytes) -> Callable[[Tensor], dict[str, Tensor]]:
    """A .pt2 file as a function."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = torch.export.load(io.BytesIO(content)).module()
    run: Callable[[Tensor], dict[str, Tensor]] = torch.no_grad()(module)
    return run
