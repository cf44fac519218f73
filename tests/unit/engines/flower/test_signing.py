"""Signed apps: Flower's own SuperNode accepts what an operator signed, and nothing else."""

import json
import subprocess
import sys
from base64 import urlsafe_b64encode as b64encode
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr")

import httpx
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from flwr.proto.fab_pb2 import Fab as FabProto
from flwr.proto.fab_pb2 import GetFabRequest, GetFabResponse
from flwr.supercore.fab import Fab
from flwr.supernode.cli.flower_supernode import (
    _try_obtain_trusted_entities,
    _validate_public_keys_ed25519,
)
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.start_client_internal import _verify_fab

from fedensemble import deploy
from fedensemble.config.schema import resolve
from fedensemble.deploy.generate import write_app
from fedensemble.deploy.routes import SIGNATURES_PREFIX
from fedensemble.deploy.signing import build_bundle, describe_trust, read_signatures, sign_app
from fedensemble.deploy.supernode import client_class, read_arguments
from fedensemble.errors import InputError


def make_key(path, kind=ed25519.Ed25519PrivateKey.generate):
    key = kind()
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.OpenSSH,
            serialization.NoEncryption(),
        )
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    Path(f"{path}.pub").write_bytes(public)
    return path


@pytest.fixture(scope="module")
def signed(tmp_path_factory):
    """An app, its signature, and the file of trust in its operator."""
    folder = tmp_path_factory.mktemp("signed")
    write_app(
        resolve({"name": "signed", "data": {"clients": 2}, "engine": {"device": "cpu"}}),
        folder / "app",
    )
    key = make_key(folder / "operator")
    (folder / "trusted.yaml").write_text(describe_trust([Path(f"{key}.pub")]))
    return folder, sign_app(folder / "app", key, folder / "signatures")


def trust(file):
    entities = _try_obtain_trusted_entities(file)
    _validate_public_keys_ed25519(entities)
    return entities


def served(monkeypatch, bundle, folder, said=None):
    """The app as a SuperNode gets it from a SuperLink that has it, through a gateway with a folder
    of signatures.
    """
    answer = GetFabResponse(fab=FabProto(hash_str="?", content=bundle, verifications=said or {}))
    monkeypatch.setattr(FleetHttpClient, "GetFab", lambda self, request: answer)

    def get(url):
        file = folder / url.partition(SIGNATURES_PREFIX)[2]
        return (
            httpx.Response(200, content=file.read_bytes())
            if file.is_file()
            else httpx.Response(404)
        )

    client = client_class(True)("https://server:1")
    monkeypatch.setattr(client._client, "get", get)
    fab = client.GetFab(GetFabRequest()).fab
    client.close()
    return Fab(fab.hash_str, fab.content, dict(fab.verifications))


def is_run(fab, entities):
    """What `flower-supernode --trusted-entities` asks before it runs an app."""
    return bool(fab.verifications.get("valid_license")) and _verify_fab(fab, entities)


def test_a_signed_app_is_run_and_a_changed_one_is_not(signed, monkeypatch):
    folder, file = signed
    bundle, entities = build_bundle(folder / "app"), trust(folder / "trusted.yaml")
    assert is_run(served(monkeypatch, bundle, file.parent), entities)
    assert not is_run(served(monkeypatch, bundle + b"x", file.parent), entities), (
        "no signature has its hash"
    )
    other = file.with_name(f"{'0' * 64}.json")
    assert not is_run(served(monkeypatch, bundle, other.parent / "none"), entities), "unsigned"


def test_a_signature_of_another_app_or_of_somebody_else_does_not_help(
    signed, monkeypatch, tmp_path
):
    folder, file = signed
    bundle, entities = build_bundle(folder / "app"), trust(folder / "trusted.yaml")
    (tmp_path / f"{sha256(bundle + b'evil').hexdigest()}.json").write_bytes(file.read_bytes())
    assert not is_run(served(monkeypatch, bundle + b"evil", tmp_path), entities)

    mine = sign_app(folder / "app", make_key(tmp_path / "stranger"), tmp_path / "theirs")
    assert not is_run(served(monkeypatch, bundle, mine.parent), entities)
    [entry], [name] = json.loads(mine.read_text()).values(), entities
    mine.write_text(json.dumps({name: entry}))  # under the operator's name
    assert not is_run(served(monkeypatch, bundle, mine.parent), entities)


def test_what_the_superlink_says_of_signatures_is_not_used(signed, monkeypatch, tmp_path):
    """Flower's SuperNode would stop at an entry that it cannot read."""
    folder, _ = signed
    said = {
        "valid_license": "Valid",
        "a": "no JSON",
        next(iter(trust(folder / "trusted.yaml"))): "{}",
    }
    assert served(monkeypatch, build_bundle(folder / "app"), tmp_path, said).verifications == {}


def test_two_operators_may_sign_one_app(signed, tmp_path):
    folder, _ = signed
    for name in ("one", "two"):
        file = sign_app(folder / "app", make_key(tmp_path / name), tmp_path / "signatures")
    assert len(read_signatures(file.read_bytes())) == 2


ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "signed_at": st.integers() | st.booleans() | st.text(max_size=3),
        "signature": st.integers()
        | st.text(max_size=9)
        | st.binary(min_size=63, max_size=65).map(b64encode).map(bytes.decode),
    },
)
FILE = st.dictionaries(
    st.text(max_size=3), ENTRY | st.none() | st.integers(), max_size=3
) | st.lists(st.integers())


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=40) | FILE.map(lambda value: json.dumps(value).encode()))
def test_no_file_of_signatures_stops_a_supernode(content):
    for entry in read_signatures(content).values():
        assert entry["signed_at"].to_bytes(8, "big") and len(entry["signature"]) >= 86


def safe_arguments(folder):
    return [
        "--superlink",
        "s:1",
        "--root-certificates",
        "ca.crt",
        "--auth-supernode-private-key",
        "node",
        "--trusted-entities",
        str(folder / "trusted.yaml"),
        "--node-config",
        "x=1",
    ]


def test_a_supernode_that_would_trust_everybody_is_not_started(signed, tmp_path):
    folder, _ = signed
    arguments = safe_arguments(folder)
    assert read_arguments(arguments).superlink == "s:1"
    with pytest.raises(InputError, match="no --insecure"):
        read_arguments([*arguments, "--insecure"])
    for place in range(0, 8, 2):
        with pytest.raises(InputError, match=f"needs {arguments[place]}"):
            read_arguments(arguments[:place] + arguments[place + 2 :])
    for text in ("{}", "", "[]", "{: :"):
        (tmp_path / "trusted.yaml").write_text(text)
        with pytest.raises(InputError, match=r"names no key|cannot be read"):
            read_arguments(safe_arguments(tmp_path))


def test_bad_keys_and_apps_are_refused_in_words(signed, tmp_path):
    folder, _ = signed
    node = make_key(tmp_path / "node", lambda: ec.generate_private_key(ec.SECP384R1()))
    with pytest.raises(InputError, match="not an Ed25519 key"):
        sign_app(folder / "app", node, tmp_path)
    with pytest.raises(InputError, match="not an Ed25519 key"):
        describe_trust([Path(f"{node}.pub")])
    with pytest.raises(InputError, match="not a public key"):
        describe_trust([node])
    with pytest.raises(InputError, match="not a private key"):
        sign_app(folder / "app", Path(f"{node}.pub"), tmp_path)
    with pytest.raises(InputError, match=r"no pyproject\.toml"):
        sign_app(tmp_path, folder / "operator", tmp_path)
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    with pytest.raises(InputError, match="cannot bundle"):
        sign_app(tmp_path, folder / "operator", tmp_path)


def test_the_command_line_ends_with_a_message():
    words = ["fleet", "supernode", "--certificate", "x.crt", "--superlink", "a:1"]
    done = subprocess.run(
        [sys.executable, "-m", "fedensemble", *words], capture_output=True, text=True
    )
    assert (
        done.returncode == 2
        and "needs --root-certificates" in done.stderr
        and "Traceback" not in done.stderr
    )


def test_the_gateway_supernodes_and_keys_need_no_torch():
    """It would be a second and 150 MB for each of them."""
    program = (
        "import sys\n"
        "from fedensemble.deploy import certificates, gateway, nginx, signing, supernode\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_names_of_apps_are_imported_when_they_are_used():
    for name in deploy.__all__:
        assert getattr(deploy, name).__module__.startswith("fedensemble.deploy.app")
    with pytest.raises(AttributeError, match="has no attribute 'load_flie'"):
        deploy.load_flie
