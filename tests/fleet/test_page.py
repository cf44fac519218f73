"""The fleet page, followed word for word: every block of commands, in order, in one new folder."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")

import fedensemble

from . import forked_apps

pytestmark = [pytest.mark.fleet, pytest.mark.xdist_group("fleet"), pytest.mark.timeout(1800)]

PAGE = Path(__file__).parents[2] / "docs" / "how-to-fleet.md"
SERVER = "fleet.example.org"


def page_script():
    """The page's commands. Other tests may use the page's ports, so they are replaced."""
    text = PAGE.read_text(encoding="utf-8")
    script = "\n".join(re.findall(r"^```bash\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    superlink, gateway, *nodes = free_ports(6)
    start = "flower-superlink --insecure"
    replaced = {
        f"SERVER={SERVER}": "SERVER=localhost",
        "127.0.0.1:8000": f"127.0.0.1:{superlink}",
        "--port 8000": f"--port {superlink}",
        start: f"{start} --port {superlink}",  # 8000 is the default
        "8443": str(gateway),
        "--port 910$i": f"--port $(echo {' '.join(map(str, nodes))} | cut -d' ' -f$i)",
    }
    for old, new in replaced.items():
        assert old in script, f"the page has no {old}"
        script = script.replace(old, new)
    return script


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for found in sockets:
            found.bind(("127.0.0.1", 0))
        return [found.getsockname()[1] for found in sockets]


def find_processes(home):
    """Number and command line of the script's processes: those that have its FLWR_HOME."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it is over, or somebody else's
            if f"FLWR_HOME={home}".encode() in (place / "environ").read_bytes().split(b"\0"):
                found[int(place.name)] = (place / "cmdline").read_text().replace("\0", " ")
    return found


def stop_processes(home):
    """Kills what a failed script has left, and nothing else."""
    for process in find_processes(home):
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)


@pytest.fixture
def followed(tmp_path):
    """The folder in which somebody has followed the page, and what they saw."""
    bin_folder = str(Path(sys.executable).parent)
    environment = {
        **os.environ,
        "PATH": f"{bin_folder}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": str(Path(fedensemble.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
        "NO_PROXY": "localhost,127.0.0.1",
    }
    log = tmp_path / "log.txt"
    forks = forked_apps.start(tmp_path / "forks", environment, "flwr-clientapp")
    try:
        with log.open("wb") as output:
            done = subprocess.run(
                ["bash", "-ex", "-c", page_script()],
                cwd=tmp_path,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                timeout=1700,
            )
        logs = {file.name: file.read_text()[-2000:] for file in sorted(tmp_path.glob("*.log"))}
        assert done.returncode == 0, f"{log.read_text()[-4000:]}\n{logs}"
        yield tmp_path, log.read_text()
    finally:
        forks.kill()
        forks.wait()
        stop_processes(tmp_path / "flwr")


def test_the_fleet_page_can_be_followed_word_for_word(followed):
    folder, seen = followed
    warnings = [line for line in seen.splitlines() if "WARNING" in line or "Traceback" in line]
    # On a slow machine the server says that it waits, which is no fault of the page.
    assert all("have not replied yet" in line for line in warnings), warnings
    names = [f"site-{i}" for i in range(1, 5)]
    for run, members in (("rehearsal", [f"partition-{i}" for i in range(1, 5)]), ("run1", names)):
        assert json.loads((folder / run / "clients.json").read_text())["names"] == members
        lines = (folder / run / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        assert [record["visits"] for record in records] == [4, 4]
        assert [record["fleet"] for record in records] == [{"asked": 4}] * 2
        assert all(record["test"]["accuracy"] > 0.6 for record in records)
        summary = json.loads((folder / run / "summary.json").read_text())
        assert summary["test"] == records[-1]["test"] and summary["bytes_up"] > 0
    # the stream says what the page says
    assert re.search(r"round 2: 4 replies, loss .*, test accuracy ", seen) and "Finished" in seen
    report = (folder / "run1" / "report.html").read_text()
    assert all(
        name in report for name in (*names, "fleet,\N{NO-BREAK SPACE}4\N{NO-BREAK SPACE}clients")
    )
    # Flower passes its server app a token on the command line, which is recorded
    command = json.loads((folder / "run1" / "env.json").read_text())["command"]
    assert command[command.index("--token") + 1] == "***"
    with np.load(folder / "out.npz") as out:
        assert out["mean"].shape == (2, 2)
    # Flower's helper processes end when they notice, after some seconds, that their parent has.
    deadline = time.monotonic() + 60
    while (left := find_processes(folder / "flwr")) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left, "the page stops what it has started"
