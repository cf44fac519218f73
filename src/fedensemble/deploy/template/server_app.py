"""The ServerApp: runs the rounds."""

from pathlib import Path

from fedensemble.deploy import server_app

app = server_app(Path(__file__).parent)
