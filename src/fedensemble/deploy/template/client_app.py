"""The ClientApp: trains on the examples that `load` returns."""

from pathlib import Path

from fedensemble.deploy import client_app

from .data import load

app = client_app(Path(__file__).parent, load)
