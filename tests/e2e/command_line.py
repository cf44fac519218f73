"""The command line in this process: a new one would cost seconds each time."""

import os
import sys
from pathlib import Path

from typer.testing import CliRunner

from fedensemble.cli.exit_codes import run_app
from fedensemble.cli.main import app


def run(*arguments: object, cwd: Path) -> tuple[int, str, str]:
    """Carries a command out in a folder: exit code, output, errors."""
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
