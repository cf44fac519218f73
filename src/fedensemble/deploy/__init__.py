"""From a config to a fleet: a Flower app that trains it on real clients. Running one needs the
extra `flower`.
"""

from .app import client_app, server_app
from .app_spec import example_client

__all__ = ["client_app", "example_client", "server_app"]
