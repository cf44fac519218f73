"""Runs a whole fleet on this machine, trains an app, and shows that outsiders get no access.

    python examples/flower_tls/fleet.py FOLDER

This takes some minutes; FOLDER must be new. On real machines the same commands run in the same
order. Each command is printed before it is started.
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

from fedensemble.deploy.certificates import (
    certify_node,
    make_certificates,
    make_node_key,
    make_operator_key,
)

HOST = "127.0.0.1"
HERMETIC = {  # no installation, no telemetry, no update check, no proxy
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
    """The processes of a fleet on this machine. On exit, exactly these are stopped."""

    def __init__(self, folder: Path, echo=lambda text: None) -> None:
        self.folder, self.echo = folder.resolve(), echo
        self.folder.mkdir(parents=True, exist_ok=True)
        # ports of the SuperLink (loopback only) and of the gateway (public)
        self.port, self.public = free_port(), free_port()
        self.started: dict[str, subprocess.Popen] = {}
        bin_folder = str(Path(sys.executable).parent)
        self.environment = {
            **os.environ,
            **HERMETIC,
            "FLWR_HOME": str(self.folder / "flwr"),
            "OMP_NUM_THREADS": "1",
            "PATH": f"{bin_folder}{os.pathsep}{os.environ.get('PATH', '')}",
        }
        make_certificates(self.folder / "keys", ["localhost", HOST])
        make_operator_key(self.folder / "operator")
        (self.folder / "signatures").mkdir(exist_ok=True)
        self.write_connections()
        trusted = self.command("fedensemble", "fleet", "trust", self.folder / "operator.pub").stdout
        (self.folder / "trusted.yaml").write_text(trusted)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for name in list(self.started):
            self.kill(name)

    def write_connections(self) -> None:
        """Writes connections for `flwr`: "fleet" for the operator, "outside" for an outsider."""
        lines = []
        for name, port in (("fleet", self.port), ("outside", self.public)):
            lines += [f"[superlink.{name}]", f'address = "{HOST}:{port}"']
            lines += [f'root-certificates = "{self.folder / "keys" / "ca.crt"}"', ""]
        (self.folder / "flwr").mkdir(exist_ok=True)
        (self.folder / "flwr" / "config.toml").write_text("\n".join(lines))

    def superlink(self) -> None:
        """Starts the SuperLink on loopback, and waits until it listens."""
        keys = self.folder / "keys"
        self.start(
            "superlink",
            [
                "flower-superlink",
                "--host",
                HOST,
                "--port",
                self.port,
                "--database",
                self.folder / "state.db",
                "--ssl-ca-certfile",
                keys / "ca.crt",
                "--ssl-certfile",
                keys / "superlink.crt",
                "--ssl-keyfile",
                keys / "superlink.key",
                "--enable-supernode-auth",
            ],
        )
        wait(
            lambda: listens(self.port), 120, "the SuperLink does not listen", self.log("superlink")
        )

    def gateway(self) -> None:
        """Starts the gateway, to which clients connect, and waits until it listens."""
        keys = self.folder / "keys"
        self.start(
            "gateway",
            [
                "fedensemble",
                "fleet",
                "gateway",
                "--listen",
                f"{HOST}:{self.public}",
                "--superlink",
                f"{HOST}:{self.port}",
                "--authority",
                keys / "ca.crt",
                "--certificate",
                keys / "server.crt",
                "--key",
                keys / "server.key",
                "--signatures",
                self.folder / "signatures",
            ],
        )
        wait(lambda: listens(self.public), 120, "the gateway does not listen", self.log("gateway"))

    def make_node(self, name: str) -> Path:
        """Creates a node's key and certificate unless they exist; returns the path of the key."""
        key = self.folder / "nodes" / name
        if not key.exists():
            make_node_key(key)
            certify_node(self.folder / "keys", Path(f"{key}.pub"), Path(f"{key}.crt"))
        return key

    def register(self, name: str) -> str:
        """Registers a node's public key under a name; returns the node's id."""
        key = self.make_node(name)
        done = self.flwr(
            "supernode", "register", f"{key}.pub", "fleet", "--name", name, "--format", "json"
        )
        return str(read_json(done.stdout)["node-id"])

    def node(
        self, number: int, authority: str = "keys", name: str = "", data: Path | None = None
    ) -> None:
        """Starts a SuperNode with its own data, key and folder for client state."""
        name = name or f"client-{number}"
        node_config = f'partition-id={number} memory-dir="{self.folder / "memory" / name}"'
        node_config += f' data="{data}"' if data else ""
        key = self.folder / "nodes" / name
        self.start(
            name,
            [
                "fedensemble",
                "fleet",
                "supernode",
                "--certificate",
                f"{key}.crt",
                "--superlink",
                f"{HOST}:{self.public}",
                "--port",
                free_port(),
                "--root-certificates",
                self.folder / authority / "ca.crt",
                "--auth-supernode-private-key",
                key,
                "--trusted-entities",
                self.folder / "trusted.yaml",
                "--node-config",
                node_config,
            ],
        )

    def sign(self, app: Path) -> None:
        """Signs an app as it is now. Clients run only signed apps."""
        folder = self.folder / "signatures"
        self.command(
            "fedensemble",
            "fleet",
            "sign",
            app,
            "--key",
            self.folder / "operator",
            "--signatures",
            folder,
        )

    def flwr(self, *words, check: bool = True) -> subprocess.CompletedProcess:
        """Runs the `flwr` command until it exits."""
        return self.command("flwr", *words, check=check)

    def command(self, *words, check: bool = True) -> subprocess.CompletedProcess:
        """Runs a command until it exits."""
        command = [str(word) for word in words]
        self.echo(shlex.join(command))
        done = subprocess.run(
            command,
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        if check and done.returncode:
            raise SystemExit(f"{shlex.join(command)} failed:\n{done.stdout}{done.stderr}")
        return done

    def run(self, app: Path, **settings) -> str:
        """Starts a run of an app; returns the run's id."""
        run_config = " ".join(
            f"{name.replace('_', '-')}={json.dumps(value)}" for name, value in settings.items()
        )
        done = self.flwr("run", app, "fleet", "--format", "json", "-c", run_config)
        return str(read_json(done.stdout)["run-id"])

    def start(self, name: str, command: list) -> None:
        command = [str(word) for word in command]
        self.echo(shlex.join(command))
        with open(self.log(name), "ab") as log:
            self.started[name] = subprocess.Popen(
                command,
                env=self.environment,
                cwd=self.folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        """Kills a process and its children without notice, like a power failure."""
        process = self.started.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"


def read_json(text: str) -> dict:
    """Returns the JSON object in a command's output, without the text around it."""
    return json.loads(text[text.index("{") : text.rindex("}") + 1])


def free_port() -> int:
    with socket.socket() as server:
        server.bind((HOST, 0))
        return server.getsockname()[1]


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex((HOST, port)) == 0


def wait(condition, seconds: float, complaint: str, log: Path | None = None) -> None:
    """Waits until `condition()` is true; exits with `complaint` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(
                f"{complaint} after {seconds:g} s.\n{log.read_text()[-3000:] if log else ''}"
            )
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
        fleet.gateway()
        for number in range(3):
            fleet.register(f"client-{number}")
            fleet.node(number)
        fleet.sign(fleet.folder / "app")
        run_dir = fleet.folder / "run"
        fleet.run(fleet.folder / "app", run_dir=str(run_dir), clients=3)

        print("\nAn outsider, who has the authority's certificate:")
        outsider = fleet.flwr("list", "outside", check=False)
        print(f"exit status {outsider.returncode}")
        print("\nA node with a certificate and without registration:")
        fleet.make_node("unregistered")
        fleet.node(3, name="unregistered")

        wait(
            (run_dir / "summary.json").exists,
            600,
            "The training is not finished",
            fleet.log("superlink"),
        )
        for line in (run_dir / "metrics.jsonl").read_text().splitlines():
            print(line)
        node_log = fleet.log("unregistered").read_text()
        last_line = (node_log.strip().splitlines() or ["nothing"])[-1]
        print(f"The unregistered node got no message; its log ends with: {last_line}")
        if not outsider.returncode or "Receiving" in node_log:
            raise SystemExit("Outsiders got access, which must not happen.")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
