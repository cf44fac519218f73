"""Help texts: all commands have one, for each argument and option, and printing it is quick."""

import subprocess
import sys

import click
import pytest
import typer
from typer.testing import CliRunner

from fedensemble.bench.cli import BENCHMARKS
from fedensemble.catalog.options import KINDS
from fedensemble.cli.main import app
from fedensemble.experiment.studies.paper_table import NAMES
from fedensemble.version import VERSION


def commands(
    command: click.Command, path: tuple[str, ...] = ()
) -> dict[tuple[str, ...], click.Command]:
    """All commands by the words that call them; () is the program itself."""
    found = {path: command}
    for name, inner in getattr(command, "commands", {}).items():
        found |= commands(inner, (*path, name))
    return found


COMMANDS = commands(typer.main.get_command(app))


def test_commands_are_found():
    assert {(), ("run",), ("rm",), ("data", "get"), ("fleet", "supernode")} <= set(COMMANDS)


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_argument_and_option_has_help(path):
    command = COMMANDS[path]
    assert command.help
    for parameter in command.params:
        text = getattr(parameter, "help", None) or ""
        assert text and text[0].isupper() and text.endswith("."), (path, parameter.name, text)


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_both_help_options_print_the_same(path):
    said = [CliRunner().invoke(app, [*path, option]) for option in ("-h", "--help")]
    assert [result.exit_code for result in said] == [0, 0]
    assert said[0].output == said[1].output
    assert "Usage:" in said[0].output and "-h, --help" in said[0].output


def test_choices_are_named():
    """Help must not import the registries, so that names are written out; they are complete."""
    for topic in [*KINDS, "runs"]:
        assert topic in " ".join(CliRunner().invoke(app, ["ls", "--help"]).output.split())
    for name in NAMES:
        assert name in CliRunner().invoke(app, ["reproduce", "--help"]).output.replace("-\n", "-")
    for name in BENCHMARKS:
        assert name in CliRunner().invoke(app, ["bench", "--help"]).output


def test_help_does_not_import_torch():
    """In one process, because each import of torch takes a second, and there must be none."""
    calls = [[*path, "--help"] for path in COMMANDS] + [["--version"]]
    program = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from fedensemble.cli.main import app\n"
        f"for words in {calls!r}:\n"
        "    result = CliRunner().invoke(app, words)\n"
        "    assert result.exit_code == 0, (words, result.output)\n"
        "    heavy = {'torch', 'numpy', 'matplotlib', 'pydantic', 'flwr'} & set(sys.modules)\n"
        "    assert not heavy, (words, heavy)\n"
        f"assert result.output.startswith('fedensemble {VERSION} (torch 2.'), result.output\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_program_prints_its_help_without_torch():
    """As a user starts it: with the hook that handles Ctrl-C during imports."""
    program = (
        "import runpy, sys\n"
        "sys.argv = ['fedensemble', '--help']\n"
        "try: runpy.run_module('fedensemble', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and "Train an ensemble." in done.stdout, done.stderr
