"""Implements `fedensemble fleet`: commands that secure a Flower deployment.

They complement Flower's own commands: a gateway that checks client certificates, and signed apps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...errors import InputError

fleet_app = typer.Typer(
    no_args_is_help=True, help='Secure a fleet of real clients; needs the extra "flower".'
)

Listen = Annotated[str, typer.Option(help="Address to listen on for clients, host:port.")]
SuperLink = Annotated[
    str, typer.Option(help="Address of the SuperLink; it should be reachable from this host only.")
]
Authority = Annotated[Path, typer.Option(help="Certificate of the fleet's CA (PEM).")]
Certificate = Annotated[Path, typer.Option(help="Certificate of the gateway (PEM).")]
Key = Annotated[Path, typer.Option(help="Private key of the gateway (PEM).")]
Signatures = Annotated[Path | None, typer.Option(help="Folder with the signatures of apps.")]
MaxBody = Annotated[
    int, typer.Option("--max-body", help="Maximum size of a request in MiB.", min=1, max=2048)
]


def _require_flower() -> None:
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise InputError('This command needs Flower: pip install "fedensemble[flower]".') from None


@fleet_app.command("gateway")
def gateway_command(
    authority: Authority,
    certificate: Certificate,
    key: Key,
    signatures: Signatures = None,
    listen: Listen = "0.0.0.0:8443",
    superlink: SuperLink = "127.0.0.1:8000",
    max_body: MaxBody = 64,
) -> None:
    """Start a gateway that admits clients with a certificate.

    It forwards to a SuperLink on this host only the requests that SuperNodes need.
    """
    _require_flower()
    from ...deploy.gateway import GatewayOptions, serve

    serve(
        GatewayOptions(listen, superlink, authority, certificate, key, signatures, max_body * 2**20)
    )


@fleet_app.command("nginx")
def nginx_command(
    authority: Authority,
    certificate: Certificate,
    key: Key,
    signatures: Signatures = None,
    listen: Listen = "0.0.0.0:8443",
    superlink: SuperLink = "127.0.0.1:8000",
    max_body: MaxBody = 64,
) -> None:
    """Print an nginx configuration equivalent to the gateway."""
    _require_flower()
    from ...deploy.gateway import GatewayOptions
    from ...deploy.nginx import render_nginx

    options = GatewayOptions(
        listen, superlink, authority, certificate, key, signatures, max_body * 2**20
    )
    typer.echo(render_nginx(options), nl=False)


@fleet_app.command("authority")
def authority_command(
    folder: Annotated[Path, typer.Argument(help="Folder to write to; ca.key must stay secret.")],
    hosts: Annotated[
        list[str], typer.Argument(help="Names and addresses under which clients reach the gateway.")
    ],
) -> None:
    """Create a fleet's CA and the certificates of its server.

    ca.crt goes to all machines; server.* and superlink.* go to the server; ca.key stays offline.
    """
    _require_flower()
    from ...deploy.certificates import make_certificates

    make_certificates(folder, hosts)
    typer.echo(f"Written to {folder}: ca.crt, server.crt, superlink.crt and their keys.")


@fleet_app.command("certify")
def certify_command(
    folder: Annotated[Path, typer.Argument(help="Folder of the fleet's CA.")],
    keys: Annotated[list[Path], typer.Argument(help="Public ECDSA keys of clients, NAME.pub.")],
) -> None:
    """Create a client certificate NAME.crt next to each public key NAME.pub."""
    _require_flower()
    from ...deploy.certificates import certify_node

    for key in keys:
        certificate = key.with_suffix(".crt")
        certify_node(folder, key, certificate)
        typer.echo(f"Written: {certificate}")


@fleet_app.command("sign")
def sign_command(
    app: Annotated[Path, typer.Argument(help="Folder of the app, as passed to `flwr run`.")],
    key: Annotated[Path, typer.Option(help="Private Ed25519 key of an operator (OpenSSH format).")],
    signatures: Annotated[
        Path, typer.Option(help="Folder with the gateway's signatures of apps.")
    ] = Path("signatures"),
) -> None:
    """Sign an app, so that clients run it.

    Sign it again after every change to the app.
    """
    _require_flower()
    from ...deploy.signing import sign_app

    typer.echo(f"Signed: {sign_app(app, key, signatures)}")


@fleet_app.command("trust")
def trust_command(
    keys: Annotated[
        list[Path], typer.Argument(help="Public Ed25519 keys of the operators (OpenSSH format).")
    ],
) -> None:
    """Print the file for a SuperNode's --trusted-entities.

    It lists the operators whose apps the SuperNode runs.
    """
    _require_flower()
    from ...deploy.signing import describe_trust

    typer.echo(describe_trust(keys), nl=False)


@fleet_app.command(
    "supernode", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def supernode_command(
    context: typer.Context,
    certificate: Annotated[Path, typer.Option(help="Client certificate of this node (PEM).")],
) -> None:
    """Start a SuperNode that runs signed apps only.

    It presents the client certificate to the gateway. All other options are passed to
    `flower-supernode`.
    """
    _require_flower()
    try:
        from ...deploy.supernode import run_supernode
    except ImportError as error:  # it uses private modules of Flower, which may change
        raise InputError(
            f"The installed version of Flower is not supported here; install 1.41 ({error})."
        ) from None

    run_supernode(certificate, context.args)
