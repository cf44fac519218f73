"""Facts about an algorithm: its state and its messages, found by a dry run on a small model."""

from __future__ import annotations

from typing import Any

import torch

from ..core.algorithm import Algorithm
from ..core.probe import probe
from ..flat_params import payload_bytes

# Number of parameters: many blocks of a compressor, so that the ratio of message size to model size
# is that of a real model.
_PARAMETERS = 10_000
_MODES = 4  # of a joint visit


def describe_algorithm(algorithm_type: type[Algorithm]) -> dict[str, Any]:
    """Returns the state of server and client, what is sent, and message sizes in models.

    If the algorithm has settings without defaults, only the reference is returned.
    """
    record: dict[str, Any] = {"reference": algorithm_type.reference}
    try:
        algorithm = algorithm_type()
    except TypeError:
        return record
    theta = torch.zeros(_PARAMETERS)
    model_bytes = payload_bytes({"theta": theta})
    if algorithm.joint:
        theta = theta.repeat(_MODES)
        object.__setattr__(algorithm, "num_parameters", _PARAMETERS)  # as `bind` does
    mode, client_state, sent, uploads = probe(algorithm, theta)
    # Algorithms that communicate only in some rounds compare a random draw with a threshold. A draw
    # of 1 is above any threshold, and gives the size of a round that communicates.
    draw = torch.ones(1)
    return record | {
        "server_state": [name for name in mode if name != "theta"],
        "client_memory": list(client_state),
        "sends": algorithm_type.sends or f"{' + '.join(uploads)} up, {' + '.join(sent)} down",
        "models_up": _models(algorithm, int(algorithm.upload_bytes(uploads, draw)) / model_bytes),
        "models_down": _models(algorithm, int(algorithm.download_bytes(sent, draw)) / model_bytes),
    }


def _models(algorithm: Algorithm, size: float) -> float | str:
    """Returns a message's size in models; "K" if it has all modes."""
    return "K" if algorithm.joint and size == _MODES else round(size, 3)
