"""Reverse proxy in front of a SuperLink: mutual TLS, and only the calls that SuperNodes make.

The SuperLink itself listens on loopback. Its Control and Runtime APIs are not authenticated, and
this gateway never forwards requests to them. Operators use them on the server, or through an SSH
tunnel.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import InputError
from .routes import (
    MAX_BODY,
    PUBLIC_KEY_HEADER,
    REQUEST_HEADERS,
    RESPONSE_HEADERS,
    is_fleet_call,
    signature_name,
)

logger = logging.getLogger("fedensemble.gateway")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

PEER = "fedensemble.peer_key"  # scope key: public key (PEM) of the client certificate, or None
TIMEOUT = 60.0  # seconds for the next chunk of a body
MAX_SIGNATURE_FILE = 64 * 2**10


@dataclass(frozen=True)
class GatewayOptions:
    """Options of a gateway.

    Args:
        listen: "host:port" that clients connect to.
        superlink: "host:port" of the SuperLink; a loopback or private address.
        authority: certificate (PEM) of the authority that signed the certificates of the clients
            and of the SuperLink.
        certificate, key: certificate and private key of the gateway (PEM).
        signatures: folder of the apps' signatures, see `signing.sign_app`; None serves none.
        max_body: largest request body in bytes.
        max_connections: further connections get status 503, after which SuperNodes retry.
    """

    listen: str
    superlink: str
    authority: Path
    certificate: Path
    key: Path
    signatures: Path | None = None
    max_body: int = MAX_BODY
    max_connections: int = 4096

    def __post_init__(self) -> None:
        for name in ("authority", "certificate", "key"):
            if not getattr(self, name).is_file():
                raise InputError(f"The gateway's --{name} {getattr(self, name)} is not a file.")
        if self.signatures is not None and not self.signatures.is_dir():
            raise InputError(f"The gateway's --signatures {self.signatures} is not a folder.")
        host = split_address(self.superlink)[0]
        try:
            public = not ipaddress.ip_address(host).is_private
        except ValueError:  # a host name
            public = False
        if public or host in ("0.0.0.0", "::"):
            raise InputError(
                f"The SuperLink is at {self.superlink}, which others can reach past the gateway. "
                "Start it with --host 127.0.0.1 and the gateway with --superlink 127.0.0.1:8000."
            )


def split_address(address: str) -> tuple[str, int]:
    """Returns host and port of "host:port".

    >>> split_address("[::1]:8000")
    ('::1', 8000)
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise InputError(f"An address is host:port, such as 127.0.0.1:8000; got '{address}'.")
    return host.removeprefix("[").removesuffix("]"), int(port)


class RejectedError(Exception):
    """A request that is not forwarded, with the HTTP status of the response."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Gateway:
    """ASGI app that forwards the calls of SuperNodes and rejects all other requests."""

    def __init__(self, options: GatewayOptions) -> None:
        self.options = options
        try:
            context = ssl.create_default_context(cafile=str(options.authority))
        except (OSError, ssl.SSLError) as error:
            raise InputError(
                f"The gateway's --authority {options.authority} is not a certificate: {error}."
            ) from None
        self.upstream = httpx.AsyncClient(
            base_url=f"https://{options.superlink}",
            verify=context,
            timeout=TIMEOUT,
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._run_lifespan(receive, send)
        path = bytes(scope["raw_path"]).decode("ascii", "replace")
        try:
            # The TLS handshake already requires a certificate. This guards against a connection
            # that did not go through it.
            if scope[PEER] is None:
                raise RejectedError(403, "no client certificate")
            if scope["query_string"]:
                raise RejectedError(403, "a query string")
            name = signature_name(scope["method"], path)
            if name is not None:
                await self._serve_signature(name, send)
            elif is_fleet_call(scope["method"], path):
                await self._forward(scope, path, receive, send)
            else:
                raise RejectedError(403, "not a call of a SuperNode")
        except RejectedError as rejected:
            logger.warning(
                "%s %.60s %.100r: %s", (scope["client"] or "?")[0], scope["method"], path, rejected
            )
            await _respond(send, rejected.status, str(rejected).encode())

    async def _run_lifespan(self, receive: Receive, send: Send) -> None:
        """Handles ASGI's startup and shutdown events; closes connections to the SuperLink."""
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.upstream.aclose()
        await send({"type": "lifespan.shutdown.complete"})

    async def _serve_signature(self, name: str, send: Send) -> None:
        file = self.options.signatures / name if self.options.signatures else None
        if file is None or not file.is_file() or file.stat().st_size > MAX_SIGNATURE_FILE:
            raise RejectedError(404, "this app is not signed")
        await _respond(send, 200, file.read_bytes(), b"application/json")

    async def _forward(self, scope: Scope, path: str, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value for name, value in scope["headers"]}
        self._check_request(scope, headers)
        forwarded = [(name, headers[name]) for name in REQUEST_HEADERS if name in headers]
        request = self.upstream.build_request(
            "POST", path, headers=forwarded, content=_read_body(receive)
        )
        try:
            response = await self.upstream.send(request, stream=True)
        except (httpx.TransportError, _DisconnectedError) as error:
            raise RejectedError(
                502, f"the SuperLink does not respond ({type(error).__name__})"
            ) from None
        try:
            response_headers = [
                (name.encode(), response.headers[name].encode())
                for name in RESPONSE_HEADERS
                if name in response.headers
            ]
            start = {"type": "http.response.start", "status": response.status_code}
            await send({**start, "headers": response_headers})
            async for chunk in response.aiter_raw():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        # The response stays incomplete, so that the SuperNode retries.
        except httpx.TransportError as error:
            logger.warning(
                "The SuperLink broke off its response to %s: %s", path, type(error).__name__
            )
        finally:
            await response.aclose()

    def _check_request(self, scope: Scope, headers: dict[str, bytes]) -> None:
        """Raises RejectedError if a call is too large, or its key is not the certificate's."""
        length = headers.get("content-length", b"")
        # With both headers h11 follows the transfer encoding and ignores the stated length, so the
        # length would not bound the body.
        if not length.isdigit() or "transfer-encoding" in headers:
            raise RejectedError(411, "no content-length")
        if int(length) > self.options.max_body:
            raise RejectedError(
                413, f"{int(length)} bytes, where {self.options.max_body} are allowed"
            )
        try:
            claimed = base64.b64decode(headers.get(PUBLIC_KEY_HEADER, b""), validate=True)
        except binascii.Error:
            claimed = b""
        if claimed != scope[PEER]:
            raise RejectedError(403, "the SuperNode's key is not that of its certificate")


class _DisconnectedError(Exception):
    """The client disconnected, or stalled, in the middle of its request."""


async def _read_body(receive: Receive) -> AsyncIterator[bytes]:
    """Yields the chunks of a request's body."""
    more = True
    while more:
        try:
            async with asyncio.timeout(TIMEOUT):
                event = await receive()
        except TimeoutError:
            raise _DisconnectedError from None
        if event["type"] != "http.request":
            raise _DisconnectedError
        more = event.get("more_body", False)
        yield event.get("body", b"")


async def _respond(send: Send, status: int, body: bytes, kind: bytes = b"text/plain") -> None:
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class _PeerProtocol(H11Protocol):
    """HTTP/1.1 protocol that puts the client certificate's key into the scope of each request.

    ASGI has no standard field for it.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        app, key = self.app, peer_key(transport.get_extra_info("ssl_object"))

        async def with_peer(scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, PEER: key}, receive, send)

        self.app = with_peer


def peer_key(connection: ssl.SSLObject | None) -> bytes | None:
    """Returns the public key (PEM) of the peer's certificate, or None if it has shown none."""
    certificate = connection.getpeercert(binary_form=True) if connection is not None else None
    if not certificate:
        return None
    key = x509.load_der_x509_certificate(certificate).public_key()
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def build_server(options: GatewayOptions) -> uvicorn.Server:
    """Returns the gateway's HTTPS server, not started yet.

    Its TLS handshake fails for clients without a certificate of the authority.
    """
    host, port = split_address(options.listen)
    config = uvicorn.Config(
        Gateway(options),
        host=host,
        port=port,
        http=_PeerProtocol,
        ws="none",
        interface="asgi3",
        lifespan="on",
        loop="asyncio",
        workers=1,
        proxy_headers=False,
        server_header=False,
        access_log=False,
        log_level="warning",
        limit_concurrency=options.max_connections,
        timeout_keep_alive=15,
        ssl_certfile=str(options.certificate),
        ssl_keyfile=str(options.key),
        ssl_ca_certs=str(options.authority),
        ssl_cert_reqs=ssl.CERT_REQUIRED,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise InputError(
            f"The gateway's certificate, key or authority cannot be used: {error}."
        ) from None
    assert config.ssl is not None
    config.ssl.minimum_version = ssl.TLSVersion.TLSv1_3
    return uvicorn.Server(config)


def serve(options: GatewayOptions) -> None:
    """Runs a gateway until it is interrupted."""
    server = build_server(options)
    logging.basicConfig(
        format="%(asctime)s %(name)s %(levelname)s %(message)s", level=logging.WARNING
    )
    logger.setLevel(logging.INFO)
    logger.info("SuperNodes reach the SuperLink %s at %s.", options.superlink, options.listen)
    server.run()
