"""Signatures of apps: a SuperNode with `--trusted-entities` runs only apps that an operator signed.

Flower's SuperNode verifies signatures itself, but the open-source SuperLink has signatures only for
apps of Flower's own hub. The signature of your own app is a file in a folder that the gateway
serves, and `fedensemble fleet supernode` passes it to Flower. Its format is Flower's: Ed25519 over
the time and the bundle's SHA-256.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from ..durable import write_bytes
from ..errors import InputError

ED25519_BYTES = 64  # length of a signature
_OPENSSH = (serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)


def build_bundle(app: Path) -> bytes:
    """Returns the bundle (FAB) that `flwr run` builds from an app's folder, byte for byte."""
    import click
    from flwr.cli.build import build_fab_from_disk

    if not (app / "pyproject.toml").is_file():
        raise InputError(f"{app} is not the folder of an app: it has no pyproject.toml.")
    try:
        with warnings.catch_warnings():  # Flower uses a deprecated name of pathspec
            warnings.simplefilter("ignore", DeprecationWarning)
            return build_fab_from_disk(app)
    except (click.ClickException, ValueError, KeyError) as error:
        raise InputError(f"Flower cannot bundle the app in {app}: {error}.") from None


def sign_app(app: Path, key: Path, folder: Path) -> Path:
    """Signs an app as it is now; returns the path of the signature.

    Every change to the app needs a new signature.

    Args:
        app: folder of the app, as given to `flwr run`.
        key: an operator's private Ed25519 key (`ssh-keygen -t ed25519`).
        folder: the folder of signatures that the gateway serves.
    """
    private, digest, now = _read_private(key), hashlib.sha256(build_bundle(app)), int(time.time())
    signature = private.sign(message_to_sign(digest.digest(), now))
    file = folder / f"{digest.hexdigest()}.json"
    known = read_signatures(file.read_bytes()) if file.is_file() else {}
    public = private.public_key().public_bytes(*_OPENSSH).decode()
    entry = {
        "signed_at": now,
        "signature": base64.urlsafe_b64encode(signature).decode().rstrip("="),
    }
    write_bytes(file, json.dumps({**known, fingerprint(public): entry}, indent=1).encode())
    return file


def message_to_sign(digest: bytes, signed_at: int) -> bytes:
    """Returns the bytes over which Flower's SuperNode expects the signature."""
    return signed_at.to_bytes(8, "big") + digest


def read_signatures(content: bytes) -> dict[str, dict[str, Any]]:
    """Returns signatures by key fingerprint, without entries that Flower could not read."""
    try:
        entries = json.loads(content)
        return {
            str(name): {"signed_at": entry["signed_at"], "signature": entry["signature"]}
            for name, entry in entries.items()
            if type(entry["signed_at"]) is int
            and 0 <= entry["signed_at"] < 2**63
            and isinstance(entry["signature"], str)
            and len(_decode_base64(entry["signature"])) == ED25519_BYTES
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def describe_trust(files: Iterable[Path]) -> str:
    """Returns the content of the file for `--trusted-entities`: public keys by fingerprint."""
    keys = [_read_public(file) for file in files]
    return json.dumps({fingerprint(key): key for key in keys}, indent=1) + "\n"  # JSON is YAML


def fingerprint(public: str) -> str:
    """Returns the fingerprint of a public key in OpenSSH format, as `ssh-keygen -l` prints it."""
    content = base64.b64decode(public.split()[1])
    return "SHA256:" + base64.b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")


def _decode_base64(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)


def _read_private(file: Path) -> ed25519.Ed25519PrivateKey:
    try:
        key = serialization.load_ssh_private_key(file.read_bytes(), password=None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InputError(
            f"{file} is not a private key that can be read without a passphrase: {error}."
        ) from None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise InputError(
            f"{file} is not an Ed25519 key; "
            "make one with `ssh-keygen -t ed25519 -N '' -f operator`."
        )
    return key


def _read_public(file: Path) -> str:
    try:
        key = serialization.load_ssh_public_key(file.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise InputError(f"{file} is not a public key in OpenSSH format: {error}.") from None
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise InputError(f"{file} is not an Ed25519 key; Flower accepts no other kind.")
    return key.public_bytes(*_OPENSSH).decode()
