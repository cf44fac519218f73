"""Renders the gateway as an nginx configuration, from the same list of routes."""

from __future__ import annotations

import re

from ..errors import InputError
from .gateway import GatewayOptions, split_address
from .routes import FLEET_ROUTES, REQUEST_HEADERS, SIGNATURES_PREFIX

_SERVER = """\
# Written by `fedensemble fleet nginx`. Goes into the http block: /etc/nginx/conf.d/fleet.conf.
server {{
    listen {listen} ssl;
    server_tokens off;
    ssl_protocols TLSv1.3;
    ssl_certificate {certificate};
    ssl_certificate_key {key};
    # Mutual TLS: without a certificate of the fleet's authority, every response is 400.
    ssl_client_certificate {authority};
    ssl_verify_client on;
    ssl_verify_depth 1;
    client_max_body_size {max_body};
    client_header_timeout 30s;
    client_body_timeout 60s;
    proxy_ssl_verify on;
    proxy_ssl_trusted_certificate {authority};
    proxy_ssl_name {upstream_name};
    proxy_http_version 1.1;
    proxy_pass_request_headers off;
{headers}
    if ($is_args) {{ return 403; }}
    # Clients reach only the locations below, and in particular not the Control and Runtime APIs.
    location / {{ return 403; }}
{locations}{signatures}}}
"""
_LOCATION = """\
    location = {route} {{
        limit_except POST {{ deny all; }}
        proxy_pass https://{superlink}{route};
    }}
"""
_SIGNATURES = """\
    location ~ "^{prefix}([0-9a-f]{{64}})\\.json$" {{
        limit_except GET {{ deny all; }}
        default_type application/json;
        alias {folder}/$1.json;
    }}
"""


def render_nginx(options: GatewayOptions) -> str:
    """Returns an nginx server block that forwards the same calls as the gateway.

    Unlike the gateway, nginx does not compare a SuperNode's key with its certificate. The SuperLink
    verifies the key's signature in either case.
    """
    files = {
        name: getattr(options, name) for name in ("authority", "certificate", "key", "signatures")
    }
    paths = {name: str(path.resolve()) for name, path in files.items() if path is not None}
    for name, path in paths.items():
        if not re.fullmatch(r"[\w./@+-]+", path):
            raise InputError(
                f"nginx takes only plain paths: --{name} {path!r} has characters other than "
                "letters, digits and ./@+-_."
            )
    headers = [
        f"    proxy_set_header {name} $http_{name.replace('-', '_')};"
        for name in REQUEST_HEADERS
        if not name.startswith("content-length")
    ]
    # content-length is left out above: nginx buffers the body and sends its own length.
    headers.append("    proxy_set_header Connection close;")
    locations = [
        _LOCATION.format(route=route, superlink=options.superlink) for route in sorted(FLEET_ROUTES)
    ]
    signatures = (
        _SIGNATURES.format(prefix=SIGNATURES_PREFIX, folder=paths["signatures"])
        if options.signatures
        else ""
    )
    return _SERVER.format(
        listen=options.listen,
        max_body=options.max_body,
        upstream_name=_certified_name(options),
        headers="\n".join(headers),
        locations="".join(locations),
        signatures=signatures,
        **{name: paths[name] for name in ("authority", "certificate", "key")},
    )


def _certified_name(options: GatewayOptions) -> str:
    """Returns the host name in the SuperLink's certificate; nginx matches names, not addresses."""
    host = split_address(options.superlink)[0]
    return "localhost" if host in ("127.0.0.1", "::1") else host
