"""Routes that a SuperNode may call, shared by the gateway, the nginx configuration and their tests.

Flower's SuperLink serves three APIs on one port: Fleet (SuperNodes), Control (the `flwr` command)
and Runtime (the ServerApp). Only Fleet calls are authenticated. Routes that are not listed here
must never be reachable from outside.
"""

from __future__ import annotations

import re

FLEET_PREFIX = "/v1/fleet/"
# `register-node` and `unregister-node` are left out on purpose: only an operator may register
# clients, on the server.
FLEET_CALLS = (
    "activate-node",
    "deactivate-node",
    "send-node-heartbeat",
    "pull-messages",
    "push-messages",
    "get-run",
    "get-fab",
    "pull-object",
    "push-object",
    "confirm-message-received",
)
FLEET_ROUTES = frozenset(FLEET_PREFIX + call for call in FLEET_CALLS)

# Signatures of apps, one JSON file for each app, named by the SHA-256 of the app's bundle.
SIGNATURES_PREFIX = "/fedensemble/v1/signatures/"
SIGNATURE_NAME = r"[0-9a-f]{64}\.json"

PUBLIC_KEY_HEADER = "flwr-public-key"
# The only request headers that are forwarded. Others could be meant for the Control or Runtime API.
REQUEST_HEADERS = (
    "content-type",
    "content-length",
    "accept",
    PUBLIC_KEY_HEADER,
    "flwr-signature",
    "flwr-timestamp",
    "flwr-package-name",
    "flwr-package-version",
    "flwr-component-name",
)
RESPONSE_HEADERS = ("content-type", "content-length", "flwr-version-incompatibility-message")

MAX_BODY = 64 * 2**20  # Flower sends arrays in chunks of 5 MiB


def is_fleet_call(method: str, path: str) -> bool:
    """Returns whether a request is one of the calls of a SuperNode.

    >>> is_fleet_call("POST", "/v1/fleet/get-run"), is_fleet_call("POST", "/v1/control/start-run")
    (True, False)
    """
    return method == "POST" and path in FLEET_ROUTES


def signature_name(method: str, path: str) -> str | None:
    """Returns the file name in a request for an app's signature, or None for other requests.

    >>> signature_name("GET", SIGNATURES_PREFIX + "../server.key") is None
    True
    """
    name = path.removeprefix(SIGNATURES_PREFIX)
    is_signature = (
        method == "GET"
        and path.startswith(SIGNATURES_PREFIX)
        and re.fullmatch(SIGNATURE_NAME, name)
    )
    return name if is_signature else None
