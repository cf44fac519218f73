"""Runs Flower's `flwr-clientapp` in forks of a process that has imported what clients import.

A SuperNode starts a process per message, by its name in PATH, and nine tenths of what such a
process computes are the imports of PyTorch, Flower and fedensemble. The tests therefore put a
script of that name in front of PATH. It hands its arguments and its output on to a server, which
forks. Each message still has a process of its own, which imports the app for itself and dies when
the SuperNode's processes are killed.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path

SCRIPT = """#!{python} -IS
import json, os, socket, sys

with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect({address!r})
    order = json.dumps([sys.argv, os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [order], [0, 1, 2])
    server.recv(1)  # returns when the fork is over, and if this process is killed, the fork ends
"""


def start(folder: Path, environment: dict[str, str]) -> subprocess.Popen:
    """Starts the server, and puts the script into the environment's PATH."""
    folder.mkdir()
    address, script = folder / "socket", folder / "flwr-clientapp"
    script.write_text(SCRIPT.format(python=sys.executable, address=str(address)))
    script.chmod(0o700)
    environment["PATH"] = f"{folder}{os.pathsep}{environment['PATH']}"
    with open(folder / "log", "wb") as log:
        server = subprocess.Popen(
            [sys.executable, __file__, str(address)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    with server.stdout:
        if server.stdout.readline() != b"ready\n":
            raise RuntimeError((folder / "log").read_text())
    return server


def fork_per_message(address: str) -> socket.socket:
    """Serves until it is killed; returns in the forks alone, with the connection to the script."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen()
    print("ready", flush=True)
    while True:
        connection, _ = listener.accept()
        order, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
        if not os.fork():
            listener.close()
            sys.argv, cwd, environment = json.loads(order)
            os.chdir(cwd)
            os.environ.clear()
            os.environ.update(environment)
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            return connection
        connection.close()
        for stream in streams:
            os.close(stream)
        while children_ended():
            pass


def children_ended() -> bool:
    """Whether a fork was over and is now reaped."""
    try:
        return os.waitpid(-1, os.WNOHANG)[0] > 0
    except ChildProcessError:
        return False


def die_with_the_script(connection: socket.socket) -> None:
    """Ends this process as its script ends: killed, without a chance to tidy up."""
    connection.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


def main(address: str) -> None:
    for name in ("deploy.app", "deploy.client_calibration", "engines.flower.client"):
        import_module(f"fedensemble.{name}")
    import httpcore  # noqa: F401 (httpx imports it when a client is made)
    from flwr.supernode.cli import flwr_clientapp

    from fedensemble.config.schema import resolve

    resolve({"data": {"clients": 4}})  # imports what is registered
    connection = fork_per_message(address)
    threading.Thread(target=die_with_the_script, args=(connection,), daemon=True).start()
    sys.exit(flwr_clientapp())


if __name__ == "__main__":
    main(sys.argv[1])
