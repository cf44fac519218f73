"""The public side of a fleet's server: TLS with client certificates, and only the calls that
SuperNodes make.

The SuperLink itself listens on loopback. Its Control and Runtime APIs are not authenticated, and
this gateway never forwards to them: operators use them on the server, or through an SSH tunnel.
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

PEER = "fedensemble.peer_key"  # in a request's scope: the public key of the client certificate, PEM
PATIENCE = 60.0  # seconds for the next piece of a body
MAX_SIGNATURE_FILE = 64 * 2**10


@dataclass(frozen=True)
class GatewayOptions:
    """Where a gateway listens, what it forwards to, and whom it trusts.

    Args:
        listen: "host:port" that clients reach.
        superlink: "host:port" of the SuperLink; a loopback or private address.
        authority: certificate (PEM) of the authority that has signed the certificates of clients
            and of the SuperLink.
        certificate, key: the gateway's own (PEM).
        signatures: folder of the apps' signatures; see `signing.sign_app`.
        max_body: largest request in bytes.
        max_connections: more than that are answered with 503, which SuperNodes take for "try
            again".
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
        except ValueError:  # a name
            public = False
        if public or host in ("0.0.0.0", "::"):
            raise InputError(
                f"The SuperLink is at {self.superlink}, which others can reach past the gateway. Start it with "
                "--host 127.0.0.1 and give the gateway --superlink 127.0.0.1:8000."
            )


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port".

    >>> split_address("[::1]:8000")
    ('::1', 8000)
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise InputError(f"An address is host:port, such as 127.0.0.1:8000; got '{address}'.")
    return host.removeprefix("[").removesuffix("]"), int(port)


class RefusedError(Exception):
    """A request that is not forwarded."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Gateway:
    """An ASGI app that forwards the calls of SuperNodes and refuses everything else."""

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
            timeout=PATIENCE,
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._live(receive, send)
        path = bytes(scope["raw_path"]).decode("ascii", "replace")
        try:
            # TLS has asked for a certificate already: without one this is no connection of it
            if scope[PEER] is None:
                raise RefusedError(403, "no client certificate")
            if scope["query_string"]:
                raise RefusedError(403, "a query string")
            name = signature_name(scope["method"], path)
            if name is not None:
                await self._serve_signature(name, send)
            elif is_fleet_call(scope["method"], path):
                await self._forward(scope, path, receive, send)
            else:
                raise RefusedError(403, "not a call of a SuperNode")
        except RefusedError as refused:
            logger.warning(
                "%s %.60s %.100r: %s", (scope["client"] or "?")[0], scope["method"], path, refused
            )
            await _respond(send, refused.status, str(refused).encode())

    async def _live(self, receive: Receive, send: Send) -> None:
        """From the server's start to its end, when connections to the SuperLink are closed."""
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.upstream.aclose()
        await send({"type": "lifespan.shutdown.complete"})

    async def _serve_signature(self, name: str, send: Send) -> None:
        file = self.options.signatures / name if self.options.signatures else None
        if file is None or not file.is_file() or file.stat().st_size > MAX_SIGNATURE_FILE:
            raise RefusedError(404, "this app is not signed")
        await _respond(send, 200, file.read_bytes(), b"application/json")

    async def _forward(self, scope: Scope, path: str, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value for name, value in scope["headers"]}
        self._check(scope, headers)
        kept = [(name, headers[name]) for name in REQUEST_HEADERS if name in headers]
        request = self.upstream.build_request("POST", path, headers=kept, content=_body(receive))
        try:
            response = await self.upstream.send(request, stream=True)
        except (httpx.TransportError, _GoneError) as error:
            raise RefusedError(
                502, f"the SuperLink does not answer ({type(error).__name__})"
            ) from None
        try:
            found = [
                (name.encode(), response.headers[name].encode())
                for name in RESPONSE_HEADERS
                if name in response.headers
            ]
            await send(
                {"type": "http.response.start", "status": response.status_code, "headers": found}
            )
            async for piece in response.aiter_raw():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        # the answer stays incomplete, and the SuperNode asks again
        except httpx.TransportError as error:
            logger.warning(
                "The SuperLink broke off its answer to %s: %s", path, type(error).__name__
            )
        finally:
            await response.aclose()

    def _check(self, scope: Scope, headers: dict[str, bytes]) -> None:
        """Refuses a call that is too large, or not of the client whose certificate it came with."""
        length = headers.get("content-length", b"")
        # With both headers h11 goes by the encoding, and a stated length would say nothing about
        # the body.
        if not length.isdigit() or "transfer-encoding" in headers:
            raise RefusedError(411, "no content-length")
        if int(length) > self.options.max_body:
            raise RefusedError(
                413, f"{int(length)} bytes, where {self.options.max_body} are allowed"
            )
        try:
            claimed = base64.b64decode(headers.get(PUBLIC_KEY_HEADER, b""), validate=True)
        except binascii.Error:
            claimed = b""
        if claimed != scope[PEER]:
            raise RefusedError(403, "the SuperNode's key is not that of its certificate")


class _GoneError(Exception):
    """The client went away in the middle of its request."""


async def _body(receive: Receive) -> AsyncIterator[bytes]:
    more = True
    while more:
        try:
            async with asyncio.timeout(PATIENCE):
                event = await receive()
        except TimeoutError:
            raise _GoneError from None
        if event["type"] != "http.request":
            raise _GoneError
        more = event.get("more_body", False)
        yield event.get("body", b"")


async def _respond(send: Send, status: int, body: bytes, kind: bytes = b"text/plain") -> None:
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class _PeerProtocol(H11Protocol):
    """HTTP/1.1 that tells the app whose certificate the connection was made with; ASGI has no field
    for it.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        app, key = self.app, peer_key(transport.get_extra_info("ssl_object"))

        async def with_peer(scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, PEER: key}, receive, send)

        self.app = with_peer


def peer_key(connection: ssl.SSLObject | None) -> bytes | None:
    """The public key (PEM) of the certificate that the other side of a connection has shown; None
    without one.
    """
    certificate = connection.getpeercert(binary_form=True) if connection is not None else None
    if not certificate:
        return None
    key = x509.load_der_x509_certificate(certificate).public_key()
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def build_server(options: GatewayOptions) -> uvicorn.Server:
    """A server of a gateway, not started yet; nobody without a certificate of the authority gets
    past its handshake.
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
