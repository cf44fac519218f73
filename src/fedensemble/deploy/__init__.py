"""Deployment of a config: a Flower app that trains on real clients. Needs the extra `flower`."""

from .app import client_app, server_app
from .app_spec import example_client, load_file

__all__ = ["client_app", "example_client", "load_file", "server_app"]
