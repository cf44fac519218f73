"""Tensors and clients' data on the device where an engine works."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...data.federated import FederatedData
from ...runtime.oom import format_gib, raise_on_oom

_ON_DEVICE: WeakKeyDictionary[FederatedData, dict[str, FederatedData]] = WeakKeyDictionary()
_SMALLER = "use fewer or smaller examples (images as uint8 need a quarter of floats), device 'cpu' or a larger card"


def moved(data: FederatedData, device: torch.device) -> FederatedData:
    """The data on a device, once for all engines that use them."""
    kept = _ON_DEVICE.setdefault(data, {})
    if str(device) not in kept:
        size = format_gib(data.x.nbytes + data.y.nbytes)
        with raise_on_oom(f"The clients' data, {size}, do", device, _SMALLER):
            there = data.to(device)
        if there.x is data.x:
            return data
        kept[str(device)] = there
    return kept[str(device)]


def to_device_async(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on the device, without waiting for what that is doing."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
