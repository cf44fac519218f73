"""A client's half of the app: it trains on what `load` gives it."""

from pathlib import Path

from fedensemble.deploy import client_app

from .data import load

app = client_app(Path(__file__).parent, load)
