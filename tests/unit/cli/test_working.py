"""What commands show while they work: something on a terminal, nothing elsewhere."""

import http.server
import threading

import numpy as np
import pytest
from typer.testing import CliRunner

from fedensemble.cli.commands.data import DownloadBar, download
from fedensemble.cli.console import console, print_line, working
from fedensemble.cli.main import app
from fedensemble.data.sources import download as download_module
from fedensemble.errors import FedEnsembleError


@pytest.fixture
def terminal(monkeypatch):
    """Makes the console take its output for a terminal of 100 columns."""
    monkeypatch.setattr(console, "_force_terminal", True)
    monkeypatch.setattr(console, "_width", 100)
    monkeypatch.setattr(console, "is_interactive", True)


def test_a_terminal_shows_the_work_and_lines_above_it(terminal, capsys):
    with working("Reading [x]") as say:
        print_line("a line")
        say("Writing")
    text = capsys.readouterr().out
    assert "Reading [x]" in text and "a line\n" in text
    assert "\x1b[?25h" in text.rsplit("a line", 1)[1], "the cursor is visible again"


def test_a_pipe_gets_lines_only(capsys):
    with working("Reading") as say:
        say("Writing")
        print_line("a line")
    assert capsys.readouterr().out == "a line\n"


def test_the_cursor_comes_back_after_an_error(terminal, capsys):
    with pytest.raises(ZeroDivisionError), working("Reading"):
        1 / 0
    assert capsys.readouterr().out.rstrip().endswith("\x1b[2K") or not console._live_stack


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    settings = ["rounds=2", "ensemble.modes=2", "data.calibration=0.2"]
    words = ["run", "--out", str(folder), *(w for text in settings for w in ("--set", text))]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    return folder


COMMANDS = {
    "report RUN": "Writing the report",
    "predict RUN INPUTS -o OUT.csv": "Predicting",
    "export RUN -o OUT.pt2": "Exporting",
    "calibrate RUN": "Calibrating",
    "data show": "Reading the data",
    "deploy --out OUT": "Reading the data",
    "ls runs --runs OUT": "Reading runs",
    "run --out OUT-2 --set rounds=1": "preparing",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_say_what_they_do(command, run, tmp_path, terminal, monkeypatch):
    np.savez(tmp_path / "in.npz", x=np.zeros((2, 1, 8, 8), np.uint8))
    places = {"RUN": run, "INPUTS": tmp_path / "in.npz", "OUT": tmp_path / "out"}
    words = command
    for name, place in places.items():
        words = words.replace(name, str(place))
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, words.split())
    assert result.exit_code == 0 or isinstance(result.exception, FedEnsembleError), result.output
    assert COMMANDS[command] in result.output


def test_downloads_show_their_bytes(terminal, tmp_path, monkeypatch, capsys):
    content = bytes(200_000)
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "file.bin").write_bytes(content)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(tmp_path / "web"))

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/file.bin"
        remote = download_module.Remote(url, None, "own")
        monkeypatch.setitem(download_module.REMOTES, "own", (remote,))
        (path,) = download("own", tmp_path / "data")
        server.shutdown()
    assert path.read_bytes() == content
    assert "200.0/200.0 kB" in capsys.readouterr().out


def test_the_bar_has_the_interface_of_tqdm():
    bar = DownloadBar()
    bar.total = 10
    bar.update(4)
    assert bar.total == 10 and bar.bar.tasks[0].completed == 4
    bar.reset()
    bar.close()
    assert bar.bar.tasks[0].completed == 0
