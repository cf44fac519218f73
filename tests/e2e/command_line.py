"""Runs commands in this process: starting a new process takes seconds."""

import os
import sys
from pathlib import Path

from typer.testing import CliRunner

from fedensemble.cli.exit_codes import run_app
from fedensemble.cli.main import app


def run(*arguments: object, cwd: Path) -> tuple[int, str, str]:
    """Runs a command in a folder, and returns exit code, output and errors."""
    before, argv = os.getcwd(), sys.argv
    os.chdir(cwd)
    sys.argv = ["fedensemble", *map(str, arguments)]
    try:
        captured = CliRunner()
        with captured.isolation() as streams:
            code = run_app(app)
            sys.stdout.flush()
            sys.stderr.flush()
            return code, streams[0].getvalue().decode(), streams[1].getvalue().decode()
    finally:
        os.chdir(before)
        sys.argv = argv
