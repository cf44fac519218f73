"""Federated methods, one file each; importing this package registers them."""

from .fedavg import FedAvg
from .fedprox import FedProx

__all__ = ["FedAvg", "FedProx"]
