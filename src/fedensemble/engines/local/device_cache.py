"""Copies of the clients' data on an engine's device, and transfers that do not block."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...data.federated import FederatedData
from ...runtime.oom import format_gib, raise_on_oom

# Copies by dataset and device. Many engines use the same data, for example the runs of one table;
# without the cache each of them would hold its own copy on the GPU.
_COPIES: WeakKeyDictionary[FederatedData, dict[str, FederatedData]] = WeakKeyDictionary()
_ADVICE = (
    "use fewer or smaller examples (images as uint8 need a quarter of floats), device 'cpu' or "
    "a larger GPU"
)


def cached_on_device(data: FederatedData, device: torch.device) -> FederatedData:
    """The data on a device; all engines that use the same data share one copy."""
    copies = _COPIES.setdefault(data, {})
    if str(device) not in copies:
        size = format_gib(data.x.nbytes + data.y.nbytes)
        with raise_on_oom(f"The clients' data, {size}, do", device, _ADVICE):
            copy = data.to(device)
        if copy.x is data.x:
            return data  # already on this device
        copies[str(device)] = copy
    return copies[str(device)]


def to_device_async(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of the tensor on the device, without waiting for kernels that run there.

    The host buffer must be pinned: CUDA copies from pageable memory synchronously.
    """
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
