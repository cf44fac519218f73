"""Deployment of a config: a Flower app that trains on real clients. Needs the extra `flower`."""

from .app import client_app, server_app
from .app_spec import example_client

__all__ = ["client_app", "example_client", "server_app"]
