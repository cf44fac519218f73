"""Runs Flower's apps in forks of a process that has imported what they import.

A SuperNode starts a process per message, `flwr-clientapp`, and a SuperLink one per run,
`flwr-serverapp`, by their names in PATH. Nine tenths of what such a process computes are the
imports of PyTorch, Flower and fedensemble, and another part is to tidy them up at its end. The
tests therefore put scripts of these names in front of PATH. A script hands its arguments and its
output on to a server, which forks. Each message still has a process of its own, which imports the
app for itself and dies when the SuperNode's processes are killed.
"""

import gc
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


def start(folder: Path, environment: dict[str, str], *names: str) -> subprocess.Popen:
    """Starts the server, and puts scripts with the names of Flower's commands into the
    environment's PATH.
    """
    folder.mkdir()
    address = folder / "socket"
    for name in names:
        script = folder / name
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
    for name in ("app", "client_calibration", "server"):
        import_module(f"fedensemble.deploy.{name}")
    import httpcore  # noqa: F401 (httpx imports it when a client is made)
    from flwr.superlink.cli import flwr_serverapp
    from flwr.supernode.cli import flwr_clientapp

    from fedensemble.config.schema import resolve

    resolve({"data": {"clients": 4}})  # imports what is registered
    # A fork shares the memory of this process until it writes. The collector would write to every
    # object, and copy everything.
    gc.collect()
    gc.freeze()
    connection = fork_per_message(address)
    threading.Thread(target=die_with_the_script, args=(connection,), daemon=True).start()
    apps = {"flwr-clientapp": flwr_clientapp, "flwr-serverapp": flwr_serverapp}
    try:
        apps[Path(sys.argv[0]).name]()
    except SystemExit as end:  # Flower has already called what it calls at the end of a process
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(end.code or 0))


if __name__ == "__main__":
    main(sys.argv[1])
