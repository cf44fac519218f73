"""Translates a traced ensemble to ONNX."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from ..errors import InputError, first_line
from ..runtime.oom import out_of_memory

_MOST_BYTES = 2**31 - 1  # of a protobuf message
# Names are unique in a graph, and values inside it are named by their operations, such as "mean".
# Outputs first get names with a dot, which no operation has; `_rename` then gives them their own.
_PREFIX = "ensemble."
_INSTALL = "pip install 'fedensemble[export]'"


def require_onnx() -> Any:
    """The package onnx; raises InputError if it or onnxscript, which torch needs, is missing."""
    try:
        import onnx
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"A .onnx file needs the package {error.name}: {_INSTALL}. A .pt2 file needs none."
        ) from None
    return onnx


def to_bytes(
    program: ExportedProgram, output_names: tuple[str, ...], facts: Mapping[str, object], model: str
) -> bytes:
    """The content of a .onnx file, checked by ONNX; `facts` are its metadata.

    Args:
        model: name of the user's class, for errors.
    """
    onnx = require_onnx()
    try:
        with _quiet():
            made = torch.onnx.export(
                program,
                dynamo=True,
                input_names=["x"],
                output_names=[f"{_PREFIX}{name}" for name in output_names],
                verbose=False,
            )
        proto = made.model_proto  # type: ignore[union-attr]
    except Exception as error:  # torch raises whatever its translations raise
        if out_of_memory(error):
            raise
        cause = error.__cause__ or error
        raise InputError(
            f"{model} cannot be translated to ONNX: {type(cause).__name__}: "
            f"{first_line(cause)[:300]}. Write a .pt2 file instead, or replace that operation in "  # type: ignore[arg-type]
            "forward()."
        ) from error
    _merge_equal_weights(proto.graph)
    if proto.ByteSize() > _MOST_BYTES:
        raise InputError(
            "An ONNX file holds at most 2 GB, and these models are larger. Export fewer modes, "
            "for example modes='best:3', or write a .pt2 file."
        )
    _name_batch(proto)
    names = {name: f"inner.{name}" for name in output_names}
    _rename(proto.graph, names | {f"{_PREFIX}{name}": name for name in output_names})
    for name, value in facts.items():
        text = value if isinstance(value, str) else json.dumps(value)
        proto.metadata_props.add(key=name, value=text)
    content: bytes = proto.SerializeToString()
    onnx.checker.check_model(content, full_check=True)
    return content


def _name_batch(proto: Any) -> None:
    """Calls the symbolic size of the first dimension of the input "batch" in the whole graph."""
    symbol = proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    graph = proto.graph
    for value in (*graph.input, *graph.output, *graph.value_info):
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param == symbol:
                size.dim_param = "batch"


def _merge_equal_weights(graph: Any) -> None:
    """Keeps one of several equal weights, such as the frozen parameters of all modes."""
    kept: dict[tuple[Any, ...], str] = {}
    names: dict[str, str] = {}
    for weight in graph.initializer:
        content = sha256(weight.raw_data).digest()
        first = kept.setdefault((weight.data_type, *weight.dims, content), weight.name)
        if weight.HasField("raw_data") and first != weight.name:
            names[weight.name] = first
    for values in (graph.initializer, graph.value_info):
        for value in [value for value in values if value.name in names]:
            values.remove(value)
    _rename(graph, names)


def _rename(graph: Any, names: Mapping[str, str]) -> None:
    """Gives values of a graph and of the bodies of its loops and conditions other names."""
    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        for attribute in node.attribute:
            for body in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                _rename(body, names)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences what torch logs and warns of its own parts, such as a missing torchvision."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def load(content: bytes) -> Callable[[Tensor], dict[str, Tensor]] | None:
    """A .onnx file as a function; None if ONNX Runtime is not installed."""
    try:
        import onnxruntime
    except ImportError:
        return None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def run(inputs: Tensor) -> dict[str, Tensor]:
        values = session.run(names, {"x": inputs.numpy()})
        return {name: torch.from_numpy(value) for name, value in zip(names, values, strict=True)}

    return run
