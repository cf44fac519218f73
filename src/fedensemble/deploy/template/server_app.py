"""The server's half of the app: it owns the rounds."""

from pathlib import Path

from fedensemble.deploy import server_app

app = server_app(Path(__file__).parent)
