"""Starts Flower's SuperNode with a client certificate and with signatures of your own apps.

Flower's own options offer neither.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import ssl
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from flwr.proto.fab_pb2 import GetFabRequest, GetFabResponse
from flwr.supernode import fleet_http_connection
from flwr.supernode.cli import flower_supernode
from flwr.supernode.fleet_http_client import FleetHttpClient

from ..errors import InputError
from .routes import SIGNATURES_PREFIX
from .signing import read_signatures

_REQUIRED = {
    "superlink": "host:port of the fleet's gateway",
    "root_certificates": "the authority's certificate",
    "auth_supernode_private_key": "this node's private key",
    "trusted_entities": "the operators' keys, from `fedensemble fleet trust`",
}


def run_supernode(certificate: Path, arguments: Sequence[str]) -> None:
    """Runs `flower-supernode` with the given arguments, in this process.

    Args:
        certificate: this node's client certificate (PEM), made for the key in
            `--auth-supernode-private-key`.
    """
    options = read_arguments(arguments)
    context = client_context(
        Path(options.root_certificates),
        certificate,
        Path(options.auth_supernode_private_key).expanduser(),
    )
    # Flower offers no way to pass an SSL context, so replace the client class in the module where
    # Flower's connection looks it up. Nothing else in this process uses it: ClientApps run in
    # processes of their own and connect to the SuperNode only.
    setattr(fleet_http_connection, FleetHttpClient.__name__, client_class(context))
    sys.argv = ["flower-supernode", *arguments]
    flower_supernode()


def read_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the options of `flower-supernode` that make it safe; raises if one is missing."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--insecure", action="store_true")
    for name in _REQUIRED:
        parser.add_argument(f"--{name.replace('_', '-')}", default="")
    options, _ = parser.parse_known_args(list(arguments))
    if options.insecure:
        raise InputError(
            "`fedensemble fleet supernode` takes no --insecure; "
            "to try an app out, use `flower-supernode`."
        )
    for name, meaning in _REQUIRED.items():
        if not getattr(options, name):
            raise InputError(
                f"`fedensemble fleet supernode` needs --{name.replace('_', '-')}: {meaning}."
            )
    check_trust(Path(options.trusted_entities).expanduser())
    return options


def check_trust(file: Path) -> None:
    """Raises if a file has no key, because Flower would then trust all apps."""
    import yaml  # type: ignore[import-untyped]  # comes with Flower, which reads this file as YAML

    try:
        keys = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise InputError(f"--trusted-entities {file} cannot be read: {error}.") from None
    if not isinstance(keys, dict) or not keys:
        raise InputError(
            f"--trusted-entities {file} names no key. "
            "Write it with `fedensemble fleet trust OPERATOR.pub`."
        )


def client_context(authority: Path, certificate: Path, key: Path) -> ssl.SSLContext:
    """Returns a TLS context that trusts one authority and shows this node's certificate."""
    try:
        private = serialization.load_ssh_private_key(key.read_bytes(), password=None)
        node_certificate = x509.load_pem_x509_certificate(certificate.read_bytes())
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InputError(
            f"The node's key {key} or its certificate {certificate} cannot be read: {error}."
        ) from None
    if node_certificate.public_key() != private.public_key():
        raise InputError(f"{certificate} was made for another key than {key}.")
    try:
        context = ssl.create_default_context(cafile=str(authority.expanduser()))
    except (OSError, ssl.SSLError) as error:
        raise InputError(f"--root-certificates {authority} cannot be read: {error}.") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    pem = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    # OpenSSL reads keys only from files, and not in the SSH format that Flower requires. So write
    # the key as PEM into a folder that only its owner can read, and delete it right after loading.
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "key.pem"
        file.touch(mode=0o600)
        file.write_bytes(pem)
        context.load_cert_chain(certificate, file)
    return context


def client_class(context: ssl.SSLContext) -> type[FleetHttpClient]:
    """Returns a class like Flower's client of the Fleet API that uses the given TLS context."""

    class CertifiedClient(FleetHttpClient):
        @classmethod
        def from_server_address(
            cls,
            server_address: str,
            insecure: bool,
            root_certificates: Any,
            interceptors: Any,
            *,
            retry_invoker: Any = None,
        ) -> CertifiedClient:
            return cls(
                f"https://{server_address}",
                interceptors=interceptors,
                verify=context,
                retry_invoker=retry_invoker,
            )

        def GetFab(self, request: GetFabRequest) -> GetFabResponse:  # noqa: N802 - Flower's name
            response = super().GetFab(request)
            # Ignore the SuperLink's own entries, because Flower may be unable to read them.
            response.fab.verifications.clear()
            signatures = self._fetch_signatures(hashlib.sha256(response.fab.content).hexdigest())
            for name, entry in signatures.items():
                response.fab.verifications[name] = json.dumps(entry)
            if signatures:  # Flower's marker that there are signatures to verify
                response.fab.verifications["valid_license"] = "Valid"
            return response

        def _fetch_signatures(self, digest: str) -> dict[str, dict[str, Any]]:
            try:
                response = self._client.get(f"{self._base_url}{SIGNATURES_PREFIX}{digest}.json")
            except httpx.TransportError:
                return {}  # without a signature, the SuperNode rejects the app and reports that
            if response.status_code != httpx.codes.OK:
                return {}
            return read_signatures(response.content)

    return CertifiedClient
