"""A whole fleet on this machine: TLS, registered nodes, one training; and what strangers get, which is nothing.

python examples/flower_tls/fleet.py FOLDER      # two minutes; FOLDER must be new

On real machines the same commands run in the same order; each is printed before it is started.
"""

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from keys import make_certificates, make_node_key

HOST = "127.0.0.1"
HERMETIC = {  # nothing is installed, nobody is told, nothing is asked of the outside
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "NO_PROXY": HOST,
}
CONFIG = """
name = "clinics"
rounds = 2
[data]
clients = 3
[model]
hidden = [8]
[ensemble]
modes = 2
strata = 2
clients_per_round = 3
[engine]
device = "cpu"
"""


class Fleet:
    """Flower's processes on this machine; all of them, and only they, are stopped at the end."""

    def __init__(self, folder: Path, echo=lambda text: None) -> None:
        self.folder, self.echo = folder.resolve(), echo
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.started: dict[str, subprocess.Popen] = {}
        bin_folder = str(Path(sys.executable).parent)
        self.environment = {
            **os.environ, **HERMETIC, "FLWR_HOME": str(self.folder / "flwr"), "OMP_NUM_THREADS": "1",
            "PATH": f"{bin_folder}{os.pathsep}{os.environ.get('PATH', '')}",
        }  # fmt: skip
        make_certificates(self.folder / "keys", ["localhost", HOST])
        self.write_connections()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for name in list(self.started):
            self.kill(name)

    def write_connections(self) -> None:
        """Tells the `flwr` command where the SuperLink is, and whose certificates to believe."""
        lines = []
        for name, authority in (("fleet", "keys"), ("mistrusted", "stranger")):
            lines += [f"[superlink.{name}]", f'address = "{HOST}:{self.port}"']
            lines += [f'root-certificates = "{self.folder / authority / "ca.crt"}"', ""]
        (self.folder / "flwr").mkdir(exist_ok=True)
        (self.folder / "flwr" / "config.toml").write_text("\n".join(lines))

    def superlink(self) -> None:
        """Starts the SuperLink, and waits until it listens."""
        keys = self.folder / "keys"
        self.start("superlink", [
            "flower-superlink", "--host", HOST, "--port", self.port, "--database", self.folder / "state.db",
            "--ssl-ca-certfile", keys / "ca.crt", "--ssl-certfile", keys / "server.crt",
            "--ssl-keyfile", keys / "server.key", "--enable-supernode-auth",
        ])  # fmt: skip
        wait(lambda: listens(self.port), 120, "the SuperLink does not listen", self.log("superlink"))

    def register(self, name: str) -> str:
        """Makes a node's key, unless there is one, and registers its public half; gives the node's number."""
        key = self.folder / "nodes" / name
        if not key.exists():
            make_node_key(key)
        done = self.flwr("supernode", "register", f"{key}.pub", "fleet", "--name", name, "--format", "json")
        return str(read_json(done.stdout)["node-id"])

    def node(self, number: int, authority: str = "keys", name: str = "", data: Path | None = None) -> None:
        """Starts a SuperNode; its data, its key and its memory are its own."""
        name = name or f"client-{number}"
        told = f'partition-id={number} memory-dir="{self.folder / "memory" / name}"'
        told += f' data="{data}"' if data else ""
        self.start(name, [
            "flower-supernode", "--superlink", f"{HOST}:{self.port}", "--port", free_port(),
            "--root-certificates", self.folder / authority / "ca.crt",
            "--auth-supernode-private-key", self.folder / "nodes" / name, "--node-config", told,
        ])  # fmt: skip

    def flwr(self, *words, check: bool = True) -> subprocess.CompletedProcess:
        """Runs the `flwr` command to its end."""
        command = ["flwr", *map(str, words)]
        self.echo(shlex.join(command))
        done = subprocess.run(
            command, env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=120, check=False
        )
        if check and done.returncode:
            raise SystemExit(f"{shlex.join(command)} failed:\n{done.stdout}{done.stderr}")
        return done

    def run(self, app: Path, **settings) -> str:
        """Starts a run of an app; gives its number."""
        text = " ".join(f"{name.replace('_', '-')}={json.dumps(value)}" for name, value in settings.items())
        done = self.flwr("run", app, "fleet", "--format", "json", "-c", text)
        return str(read_json(done.stdout)["run-id"])

    def start(self, name: str, command: list) -> None:
        command = [str(word) for word in command]
        self.echo(shlex.join(command))
        with open(self.log(name), "ab") as log:
            self.started[name] = subprocess.Popen(
                command, env=self.environment, cwd=self.folder, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self, name: str) -> None:
        """Ends a process and its children at once, as a power cut would."""
        process = self.started.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"


def read_json(text: str) -> dict:
    """What a command printed, less the words before it."""
    return json.loads(text[text.index("{") : text.rindex("}") + 1])


def free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        return found.getsockname()[1]


def listens(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex((HOST, port)) == 0


def wait(true, seconds: float, complaint: str, log: Path | None = None) -> None:
    """Waits until something is true."""
    until = time.monotonic() + seconds
    while not true():
        if time.monotonic() > until:
            raise SystemExit(f"{complaint} after {seconds:g} s.\n{log.read_text()[-3000:] if log else ''}")
        time.sleep(0.2)


def main(folder: Path) -> None:
    if folder.exists():
        raise SystemExit(f"{folder} exists already; choose a new folder.")
    with Fleet(folder, echo=lambda text: print(f"\n$ {text}", flush=True)) as fleet:
        (fleet.folder / "clinics.toml").write_text(CONFIG)
        subprocess.run(
            ["fedensemble", "deploy", "clinics.toml", "--out", "app"],
            env=fleet.environment,
            cwd=fleet.folder,
            check=True,
        )
        fleet.superlink()
        for number in range(3):
            fleet.register(f"client-{number}")
            fleet.node(number)
        run_dir = fleet.folder / "run"
        fleet.run(fleet.folder / "app", run_dir=str(run_dir), clients=3)

        make_node_key(fleet.folder / "nodes" / "unregistered")
        make_certificates(fleet.folder / "stranger", ["localhost", HOST])
        fleet.register("client-3")
        for name, authority in (("unregistered", "keys"), ("client-3", "stranger")):
            fleet.node(3, authority, name=name)
        refused = fleet.flwr("list", "mistrusted", check=False)
        print(f"A `flwr` command that believes another authority: exit status {refused.returncode}")

        wait((run_dir / "summary.json").exists, 600, "The training is not finished", fleet.log("superlink"))
        for line in (run_dir / "metrics.jsonl").read_text().splitlines():
            print(line)
        for name in ("unregistered", "client-3"):
            said = fleet.log(name).read_text().strip().splitlines() or ["nothing"]
            print(f"{name} got no message; it says: {said[-1]}")
            if "Receiving" in fleet.log(name).read_text():
                raise SystemExit(f"{name} must not get any message")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
