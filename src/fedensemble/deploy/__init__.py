"""Deployment of a config: a Flower app that trains on real clients. Needs the extra `flower`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .app import client_app, server_app
    from .app_spec import example_client, load_file

__all__ = ["client_app", "example_client", "load_file", "server_app"]

# The names are imported when they are first used. They need PyTorch, which the gateway, a SuperNode
# and the commands for keys and signatures never use: importing it here would cost each of these
# processes one to two seconds and 150 MB.
_MODULES = {
    "client_app": "app",
    "server_app": "app",
    "example_client": "app_spec",
    "load_file": "app_spec",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value
