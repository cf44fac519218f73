"""What a method keeps and sends, found by trying it on a tiny model."""

from __future__ import annotations

from typing import Any

import torch

from ..core.algorithm import Algorithm
from ..core.probe import probe
from ..flat_params import payload_bytes

# parameters; many blocks of a quantiser, so that a message's length is that of a real model's
_SIZE = 10_000


def describe_method(kind: type[Algorithm]) -> dict[str, Any]:
    """A record: what the server and a client keep, what is sent, and how long messages are beside
    the model's.

    Only the reference is known of a method that has no defaults for all of its settings.
    """
    record: dict[str, Any] = {"reference": kind.reference}
    try:
        algorithm = kind()
    except TypeError:
        return record
    # a coin of one reaches any threshold: a round that communicates
    theta, one = torch.zeros(_SIZE), torch.ones(1)
    mode, memory, sent, uploads = probe(algorithm, theta)
    model = payload_bytes({"theta": theta})
    return record | {
        "server_state": [name for name in mode if name != "theta"],
        "client_memory": list(memory),
        "sends": kind.sends or f"{' + '.join(uploads)} up, {' + '.join(sent)} down",
        "models_up": round(int(algorithm.upload_bytes(uploads, one)) / model, 3),
        "models_down": round(int(algorithm.download_bytes(sent, one)) / model, 3),
    }
