"""One fleet for all of these tests: SuperLink, gateway and four registered SuperNodes, as processes
of their own.
"""

import contextlib
import http.client
import json
import os
import shutil
import signal
import ssl
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import fedensemble
from fedensemble.config.build import build_data
from fedensemble.config.schema import resolve
from fedensemble.deploy.generate import write_app

from ..e2e import command_line
from . import forked_apps

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower_tls"
CLIENTS = 4
VALUES = {
    "name": "fleet-test",
    "rounds": 3,
    "data": {
        "source": "digits",
        "clients": CLIENTS,
        "partition": "classes",
        "classes_per_client": 5,
        "seed": 0,
    },
    "model": {"name": "mlp", "hidden": [6]},
    "ensemble": {"modes": 2, "strata": 2, "clients_per_round": CLIENTS},
    "training": {"epochs": 1, "batch_size": 32},
    "engine": {"name": "loop", "device": "cpu", "dtype": "float64"},
}

GATED = '''
import time
from pathlib import Path

from fedensemble.deploy import example_client


def load(node):
    """Part of the data set. The first call is the enrolment; training i waits for the file go-i."""
    gates = Path("GATES") / str(node["partition-id"])
    gates.mkdir(parents=True, exist_ok=True)
    call = len(list(gates.glob("call-*")))
    (gates / f"call-{call}").touch()
    patience = time.monotonic() + 300
    while call and not (gates / f"go-{call}").exists() and time.monotonic() < patience:
        time.sleep(0.1)
    return example_client(Path(__file__).parent, node)
'''


def configure(**changes):
    """The tests' config, with some tables changed."""
    merged = {
        key: {**value, **changes.pop(key)} if isinstance(value, dict) and key in changes else value
        for key, value in VALUES.items()
    }
    return resolve({**merged, **changes})


class TestedFleet:
    """The fleet of the example, with what tests ask of it."""

    __test__ = False

    def __init__(self, fleet, module):
        self.fleet, self.module = fleet, module
        self.asked = 0.0  # time of the last question for the nodes

    def __getattr__(self, name):
        return getattr(self.fleet, name)

    def begin(self, config, name, clients=CLIENTS, gated=False, signed=True, **settings):
        """Starts a run, with gates before its trainings or without, of a signed app or not; gives
        its folder.
        """
        app = self.folder / f"app-{name}"
        if not app.exists():
            write_app(config, app)
            if gated:
                (app / "fleet" / "data.py").write_text(
                    GATED.replace("GATES", str(self.folder / "gates" / name))
                )
            if signed:
                self.sign(app)
        run = self.folder / f"run-{name}"
        self.number = self.run(
            app, run_dir=str(run), clients=clients, poll=0.5, **{"min_cohort": 1, **settings}
        )
        return run

    def sign(self, app):
        """Signs an app with the command, in this process: starting a new one takes seconds."""
        key, folder = self.folder / "operator", self.folder / "signatures"
        words = ("fleet", "sign", app, "--key", key, "--signatures", folder)
        code, _, errors = command_line.run(*words, cwd=self.folder)
        assert code == 0, errors

    def rounds(self, run):
        """Records of the rounds that are over."""
        file = run / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def received(self):
        """The least number of messages that a node has received."""
        return min(
            self.log(f"client-{n}").read_text().count("Received successfully")
            for n in range(CLIENTS)
        )

    def let_through(self, name, clients, training):
        """Opens a run's gates for the given training of some clients, the first being 1."""
        for client in clients:
            gates = self.folder / "gates" / name / str(client)
            gates.mkdir(parents=True, exist_ok=True)
            (gates / f"go-{training}").touch()

    def saved(self, run):
        """The last round on disk."""
        files = sorted((run / "checkpoint").glob("round-*.safetensors"))
        return int(files[-1].stem.removeprefix("round-")) if files else 0

    def processes(self, word=""):
        """Numbers of this fleet's processes, with a word in their command; Flower takes some out of
        their group.
        """
        ours, found = f"FLWR_HOME={self.folder / 'flwr'}".encode(), []
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it is over, or somebody else's
                if (
                    ours in (place / "environ").read_bytes().split(b"\0")
                    and word in (place / "cmdline").read_text()
                ):
                    found.append(int(place.name))
        return found

    def kill_server_app(self):
        """Kills the ServerApp, and nothing else."""
        [number] = self.processes("flwr-serverapp")
        os.kill(number, signal.SIGKILL)

    def until(self, true, complaint, seconds=240):
        try:
            self.module.wait(true, seconds, complaint, self.log("superlink"))
        except SystemExit as stop:
            pytest.fail(str(stop))

    def come_back(self, number):
        """Starts a killed node again as soon as it is offline: Flower turns it away for a minute."""
        name = f"client-{number}"
        log, before = self.log(name), self.log(name).read_text().count("SuperNode ID")
        mine = log.read_text().split("SuperNode ID: ")[-1].split()[0]
        self.until(lambda: mine not in self.online(), f"{name} is killed and not offline")
        self.node(number, data=self.folder / "memory" / name / "mine.npz")
        self.until(
            lambda: log.read_text().count("SuperNode ID") > before, f"{name} is not let in again"
        )

    def post(self, port, path, message, context):
        """Status and content of a call of the SuperLink's API; 0 if TLS ends it."""
        connection = http.client.HTTPSConnection(
            self.module.HOST, port, context=context, timeout=120
        )
        with contextlib.closing(connection):
            kind = "application/protobuf"
            try:
                connection.request(
                    "POST",
                    path,
                    message.SerializeToString(),
                    {"content-type": kind, "accept": kind},
                )
                response = connection.getresponse()
                return response.status, response.read()
            except (ssl.SSLError, ConnectionError):
                return 0, b""

    def ask(self, path, message):
        """Status and answer of a call as the operator makes it, without the second that `flwr`
        takes to start.
        """
        context = ssl.create_default_context(cafile=self.folder / "keys" / "ca.crt")
        return self.post(self.port, f"/v1/control/{path}", message, context)

    def register(self, name):
        """Registers a node under a name, as `flwr supernode register` does; returns its id."""
        from cryptography.hazmat.primitives.serialization import load_ssh_public_key
        from flwr.proto.control_pb2 import RegisterNodeRequest, RegisterNodeResponse
        from flwr.supercore.primitives.asymmetric import public_key_to_bytes

        key = load_ssh_public_key(Path(f"{self.make_node(name)}.pub").read_bytes())
        message = RegisterNodeRequest(public_key=public_key_to_bytes(key), name=name)
        status, answer = self.ask("register-node", message)
        assert status == 200, status
        return str(RegisterNodeResponse.FromString(answer).node_id)

    def nodes(self):
        """Statuses of the nodes, as `flwr supernode list` shows them; asked twice a second at most."""
        from flwr.proto.control_pb2 import ListNodesRequest, ListNodesResponse

        time.sleep(max(0.0, self.asked + 0.5 - time.monotonic()))
        self.asked = time.monotonic()
        _, answer = self.ask("list-nodes", ListNodesRequest())
        listed = ListNodesResponse.FromString(answer).nodes_info
        return {str(node.node_id): node.status for node in listed}

    def online(self):
        """Numbers of the nodes that are there."""
        return {number for number, status in self.nodes().items() if status == "online"}


@pytest.fixture(scope="package")
def fleet(tmp_path_factory):
    """The fleet, until the last of these tests is over: at rest, its processes poll each other."""
    sys.path.insert(0, str(EXAMPLE))
    import fleet as module

    folder = tmp_path_factory.mktemp("fleet")
    data = build_data(configure())
    # processes in other folders run the code that is tested, too
    source = str(Path(fedensemble.__file__).parents[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", source)
        made = module.Fleet(folder)
    names = ("flwr-clientapp", "flwr-serverapp")
    forks = forked_apps.start(folder / "forks", made.environment, *names)
    with made as started:
        made.started["forks"] = forks  # ends with the fleet
        tested = TestedFleet(started, module)
        started.superlink()
        started.gateway()
        for number in range(CLIENTS):
            x, y = data.client(number)
            own = folder / "memory" / f"client-{number}"
            own.mkdir(parents=True)
            np.savez(own / "mine.npz", x=x.numpy(), y=y.numpy())
            tested.register(f"client-{number}")
            started.node(number, data=own / "mine.npz")
        yield tested
    tested.until(lambda: not tested.processes(), "some processes are left")
    shutil.rmtree(folder, ignore_errors=True)
