"""What reaches a SuperLink from outside: the calls of SuperNodes that show a certificate, through
gateway and nginx.
"""

import base64
import contextlib
import http.client
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import uvicorn
from cryptography.hazmat.primitives import serialization
from fastapi.routing import iter_route_contexts
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from flwr.superlink.main import create_app

from fedensemble.deploy import certificates
from fedensemble.deploy.gateway import GatewayOptions, build_server
from fedensemble.deploy.nginx import render_nginx
from fedensemble.deploy.routes import FLEET_ROUTES, SIGNATURES_PREFIX, is_fleet_call, signature_name
from fedensemble.errors import InputError

HOST = "127.0.0.1"
LIMIT = 100_000
APP = "ab" * 32
FRONTS = ["gateway", "nginx"]

# Requests of a client with a certificate that must not reach the SuperLink.
REFUSED = [
    ("POST", "/v1/control/list-runs"),
    ("POST", "/v1/control/start-run"),
    ("POST", "/v1/control/register-node"),
    ("POST", "/v1/runtime/pull-messages"),
    ("POST", "/v1/fleet/register-node"),
    ("POST", "/v1/fleet/unregister-node"),
    ("POST", "/v1/fleet/../control/list-runs"),
    ("POST", "/v1/fleet/%2e%2e/control/list-runs"),
    ("POST", "/v1/fleet/get-run/../../control/list-runs"),
    ("POST", "//v1/control/list-runs"),
    ("POST", "/v1/fleet/get-run/"),
    ("POST", "/v1/fleet/get-run?to=/v1/control/list-runs"),
    ("GET", "/v1/fleet/get-run"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/health"),
    ("GET", "/"),
    ("GET", f"{SIGNATURES_PREFIX}../../../server.key"),
    ("GET", f"{SIGNATURES_PREFIX}{APP}.json/../../x"),
    ("POST", f"{SIGNATURES_PREFIX}{APP}.json"),
]


def free_port():
    with socket.socket() as found:
        found.bind((HOST, 0))
        return found.getsockname()[1]


def listens(port):
    with socket.socket() as tried:
        return tried.connect_ex((HOST, port)) == 0


def wait_for(port):
    until = time.monotonic() + 60
    while not listens(port):
        assert time.monotonic() < until, "the server does not listen"
        time.sleep(0.05)


@contextlib.contextmanager
def running(server, port):
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_for(port)
        yield
    finally:
        server.should_exit = True
        thread.join(60)


class StandIn:
    """In place of the SuperLink: remembers what reaches it, and returns the body."""

    def __init__(self):
        self.seen = []

    async def __call__(self, scope, receive, send):
        body, more = b"", True
        while more:
            event = await receive()
            body, more = body + event.get("body", b""), event.get("more_body", False)
        self.seen.append(
            (scope["method"], scope["raw_path"].decode(), dict(scope["headers"]), body)
        )
        headers = [
            (b"content-type", b"application/protobuf"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [*headers, (b"x-secret", b"1")],
            }
        )
        await send({"type": "http.response.body", "body": body})


class Scene:
    """A stand-in SuperLink, and what clients reach of it."""

    def __init__(self, folder, keys):
        self.folder, self.fake_superlink = folder, StandIn()
        self.port, self.down = free_port(), free_port()
        keys.make_certificates(folder / "keys", ["localhost", HOST])
        keys.make_certificates(folder / "stranger", ["localhost", HOST])
        for authority in ("keys", "stranger"):
            self.make_node(keys, authority)
        (folder / "signatures").mkdir()
        (folder / "signatures" / f"{APP}.json").write_text("{}")
        own = folder / "keys"
        self.options = GatewayOptions(
            f"{HOST}:{free_port()}",
            f"{HOST}:{self.port}",
            own / "ca.crt",
            own / "server.crt",
            own / "server.key",
            folder / "signatures",
            LIMIT,
        )
        self.upstream = uvicorn.Server(
            uvicorn.Config(
                self.fake_superlink,
                host=HOST,
                port=self.port,
                ws="none",
                lifespan="off",
                log_level="error",
                ssl_certfile=str(own / "superlink.crt"),
                ssl_keyfile=str(own / "superlink.key"),
            )
        )

    def make_node(self, keys, authority):
        key = self.folder / authority / "node"
        keys.make_node_key(key)
        keys.certify_node(self.folder / authority, key.with_suffix(".pub"), key.with_suffix(".crt"))
        private = serialization.load_ssh_private_key(key.read_bytes(), None)
        key.with_suffix(".pem").write_bytes(
            private.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )

    def public_key(self, authority="keys"):
        key = serialization.load_ssh_public_key((self.folder / authority / "node.pub").read_bytes())
        pem = key.public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        return base64.b64encode(pem).decode()

    def ask(self, port, method, path, body=b"", shown=("keys", "node.crt", "node.pem"), **headers):
        """Status and body of a request, as it is written; an exception where TLS ends it."""
        context = ssl.create_default_context(cafile=self.folder / "keys" / "ca.crt")
        if shown:
            authority, certificate, key = shown
            context.load_cert_chain(
                self.folder / authority / certificate, self.folder / authority / key
            )
        connection = http.client.HTTPSConnection(HOST, port, context=context, timeout=60)
        with contextlib.closing(connection):
            names = {"flwr-public-key": self.public_key()} | {
                k.replace("_", "-"): v for k, v in headers.items()
            }
            connection.request(method, path, body=body, headers=names)
            answer = connection.getresponse()
            self.headers = dict(answer.getheaders())
            return answer.status, answer.read()


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    made = Scene(tmp_path_factory.mktemp("gateway"), certificates)
    with running(made.upstream, made.port):
        yield made


@contextlib.contextmanager
def nginx(scene, options):
    binary = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if binary is None:
        pytest.skip("nginx is not installed")
    folder = scene.folder / f"nginx-{options.listen.rpartition(':')[2]}"
    folder.mkdir()
    scratch = "".join(
        f"{name}_temp_path {folder}/{name};"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root;" if scene.folder.owner() == "root" else ""
    (folder / "nginx.conf").write_text(
        f"{user} daemon off; pid {folder}/pid; error_log stderr; events {{}}\n"
        f"http {{ access_log off; {scratch}\n{render_nginx(options)}}}\n"
    )
    process = subprocess.Popen(
        [binary, "-p", str(folder), "-c", str(folder / "nginx.conf")], stderr=subprocess.DEVNULL
    )
    try:
        wait_for(int(options.listen.rpartition(":")[2]))
        yield
    finally:
        process.terminate()
        process.wait(60)


@contextlib.contextmanager
def front_of(scene, kind, options):
    port = int(options.listen.rpartition(":")[2])
    with nginx(scene, options) if kind == "nginx" else running(build_server(options), port):
        yield port


@pytest.fixture(scope="module", params=FRONTS)
def front(request, scene):
    options = replace(scene.options, listen=f"{HOST}:{free_port()}")
    with front_of(scene, request.param, options) as port:
        yield port


def test_the_list_is_what_flowers_supernode_calls_and_nothing_else_of_the_superlink():
    left_out = {"/v1/fleet/register-node", "/v1/fleet/unregister-node"}
    known = {path for method, path in PROTOBUF_REQUEST_TYPES if path.startswith("/v1/fleet/")}
    assert known == FLEET_ROUTES | left_out
    served = {context.path for context in iter_route_contexts(create_app().routes)}
    assert served >= FLEET_ROUTES and {"/v1/control/start-run", "/v1/runtime/get-nodes"} <= served
    assert {path for path in served if is_fleet_call("POST", path)} == FLEET_ROUTES
    assert not [
        path for path in served for method in ("GET", "POST") if signature_name(method, path)
    ]


@pytest.mark.parametrize("path", sorted(FLEET_ROUTES))
def test_a_client_with_its_certificate_reaches_the_calls_of_a_supernode(scene, front, path):
    body = bytes(range(256)) * 100
    scene.fake_superlink.seen.clear()
    kind = {
        "content_type": "application/protobuf",
        "flwr_timestamp": "now",
        "flwr_task_token": "secret",
    }
    assert scene.ask(front, "POST", path, body, cookie="a=b", **kind) == (200, body)
    [(method, seen, headers, received)] = scene.fake_superlink.seen
    assert (method, seen, received) == ("POST", path, body)
    assert (
        headers[b"flwr-timestamp"] == b"now" and headers[b"content-type"] == b"application/protobuf"
    )
    assert headers[b"flwr-public-key"].decode() == scene.public_key()
    assert not {b"flwr-task-token", b"cookie", b"authorization"} & set(headers), (
        "meant for other APIs"
    )


@pytest.mark.parametrize(("method", "path"), REFUSED)
def test_a_client_with_its_certificate_reaches_nothing_else(scene, front, method, path):
    scene.fake_superlink.seen.clear()
    status, _ = scene.ask(front, method, path)
    assert status in (400, 403, 404, 405) and not scene.fake_superlink.seen


@pytest.mark.parametrize(
    "shown",
    [None, ("stranger", "node.crt", "node.pem"), ("keys", "server.crt", "server.key")],
    ids=["no certificate", "another authority", "a server's certificate"],
)
@pytest.mark.parametrize(
    "path", ["/v1/fleet/get-run", "/v1/control/list-runs", f"{SIGNATURES_PREFIX}{APP}.json"]
)
def test_outsiders_with_the_authoritys_certificate_reach_nothing(scene, front, shown, path):
    scene.fake_superlink.seen.clear()
    method = "GET" if path.startswith(SIGNATURES_PREFIX) else "POST"
    try:
        status, _ = scene.ask(front, method, path, shown=shown)
    except OSError:  # TLS ends it, which `ssl.SSLError` and a reset connection both are
        status = 400
    assert status == 400 and not scene.fake_superlink.seen  # nginx says so in plain words


def test_a_request_that_is_too_large_is_not_forwarded(scene, front):
    scene.fake_superlink.seen.clear()
    try:
        status, _ = scene.ask(front, "POST", "/v1/fleet/push-object", b"x" * (LIMIT + 1))
    # it was answered and closed while the body was on its way
    except (BrokenPipeError, ConnectionResetError):
        status = 413
    assert status == 413 and not scene.fake_superlink.seen


def test_signatures_are_served(scene, front):
    assert scene.ask(front, "GET", f"{SIGNATURES_PREFIX}{APP}.json") == (200, b"{}")
    assert scene.ask(front, "GET", f"{SIGNATURES_PREFIX}{'cd' * 32}.json")[0] == 404


@pytest.mark.parametrize("kind", FRONTS)
def test_a_superlink_that_is_down_is_a_reason_to_try_again(scene, kind):
    """502 is what a SuperNode waits for; 401 would end it."""
    options = replace(
        scene.options, listen=f"{HOST}:{free_port()}", superlink=f"{HOST}:{scene.down}"
    )
    with front_of(scene, kind, options) as port:
        assert scene.ask(port, "POST", "/v1/fleet/send-node-heartbeat", b"x")[0] == 502


@pytest.fixture(scope="module")
def gateway(scene):
    options = replace(scene.options, listen=f"{HOST}:{free_port()}")
    with front_of(scene, "gateway", options) as port:
        yield port


def test_a_key_that_is_not_the_certificates_is_refused(scene, gateway):
    scene.fake_superlink.seen.clear()
    for claimed in (scene.public_key("stranger"), "", "not base64!"):
        status, reason = scene.ask(
            gateway, "POST", "/v1/fleet/activate-node", b"x", flwr_public_key=claimed
        )
        assert status == 403 and b"not that of its certificate" in reason
    assert not scene.fake_superlink.seen


def test_a_body_of_unknown_length_is_refused_and_answers_tell_nothing_more_than_they_must(
    scene, gateway
):
    scene.fake_superlink.seen.clear()
    assert scene.ask(gateway, "POST", "/v1/fleet/get-run", iter([b"x"]))[0] == 411
    both = {"content_length": "1", "transfer_encoding": "chunked"}
    assert scene.ask(gateway, "POST", "/v1/fleet/get-run", b"5\r\nabcde\r\n0\r\n\r\n", **both)[
        0
    ] in (400, 411)
    assert not scene.fake_superlink.seen
    assert scene.ask(gateway, "POST", "/v1/fleet/get-run", b"x")[0] == 200
    assert not {"x-secret", "server"} & {name.lower() for name in scene.headers}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"superlink": "8.8.8.8:8000"}, "past the gateway"),
        ({"superlink": "0.0.0.0:8000"}, "past the gateway"),
        ({"superlink": "localhost"}, "host:port"),
        ({"authority": Path("nowhere.crt")}, "is not a file"),
        ({"signatures": Path("nowhere")}, "is not a folder"),
    ],
)
def test_options_that_would_leave_a_gateway_open_or_idle_are_refused(scene, changes, reason):
    with pytest.raises(InputError, match=re.escape(reason)):
        replace(scene.options, **changes)


def test_files_that_are_no_certificates_are_refused(scene, tmp_path):
    (tmp_path / "x").write_text("no certificate")
    for name in ("authority", "certificate", "key"):
        with pytest.raises(InputError, match=r"not a certificate|cannot be used"):
            build_server(replace(scene.options, **{name: tmp_path / "x"}))
