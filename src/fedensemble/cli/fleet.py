"""`fedensemble fleet`: what a deployment needs beside Flower's own commands to be closed to
outsiders.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import InputError

fleet_app = typer.Typer(
    no_args_is_help=True, help='Run a fleet of real clients safely; needs the extra "flower".'
)

Listen = Annotated[str, typer.Option(help="Address that clients reach, host:port.")]
SuperLink = Annotated[
    str, typer.Option(help="The SuperLink's address, which only this machine can reach.")
]
Authority = Annotated[Path, typer.Option(help="Certificate of the fleet's authority, PEM.")]
Certificate = Annotated[Path, typer.Option(help="The gateway's certificate, PEM.")]
Key = Annotated[Path, typer.Option(help="The gateway's private key, PEM.")]
Signatures = Annotated[Path | None, typer.Option(help="Folder of the apps' signatures.")]
MaxBody = Annotated[
    int, typer.Option("--max-body", help="Largest request, in MiB.", min=1, max=2048)
]


def _need_flower() -> None:
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise InputError('This needs Flower: pip install "fedensemble[flower]".') from None


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
    """Let clients with a certificate reach a SuperLink on this machine, and nothing of it but what
    SuperNodes need.
    """
    _need_flower()
    from ..deploy.gateway import GatewayOptions, serve

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
    """Print a configuration of nginx that does what the gateway does."""
    _need_flower()
    from ..deploy.gateway import GatewayOptions
    from ..deploy.nginx import render_nginx

    options = GatewayOptions(
        listen, superlink, authority, certificate, key, signatures, max_body * 2**20
    )
    typer.echo(render_nginx(options), nl=False)


@fleet_app.command("sign")
def sign_command(
    app: Annotated[Path, typer.Argument(help="Folder of the app, as for `flwr run`.")],
    key: Annotated[Path, typer.Option(help="An operator's private Ed25519 key, OpenSSH format.")],
    signatures: Annotated[Path, typer.Option(help="The gateway's folder of signatures.")] = Path(
        "signatures"
    ),
) -> None:
    """Sign an app as it is now, so that clients run it; repeat it after every change to the app."""
    _need_flower()
    from ..deploy.signing import sign_app

    typer.echo(f"Signed: {sign_app(app, key, signatures)}")


@fleet_app.command("trust")
def trust_command(
    keys: Annotated[
        list[Path], typer.Argument(help="Operators' public Ed25519 keys, OpenSSH format.")
    ],
) -> None:
    """Print the file for a SuperNode's --trusted-entities: whose apps it runs."""
    _need_flower()
    from ..deploy.signing import describe_trust

    typer.echo(describe_trust(keys), nl=False)


@fleet_app.command(
    "supernode", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def supernode_command(
    context: typer.Context,
    certificate: Annotated[Path, typer.Option(help="This node's client certificate, PEM.")],
) -> None:
    """Start a SuperNode that shows a certificate and runs signed apps only; other options are
    `flower-supernode`'s.
    """
    _need_flower()
    try:
        from ..deploy.supernode import run_supernode
    except ImportError as error:  # it needs more of Flower than what Flower promises to keep
        raise InputError(
            f"This version of Flower is not one that can be started so; install 1.41 ({error})."
        ) from None

    run_supernode(certificate, context.args)
