"""Creates certificates and keys of a fleet, with `cryptography`, which Flower installs."""

from __future__ import annotations

import datetime
import ipaddress
import os
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

from ..errors import InputError, StoreError

VALID_DAYS = 365
LOOPBACK = ["localhost", "127.0.0.1", "::1"]


def make_certificates(folder: Path, hosts: list[str]) -> None:
    """Writes the authority and the two certificates of the server.

    ca.crt is public. ca.key must be kept offline. server.crt and server.key are for the gateway,
    superlink.crt and superlink.key for the SuperLink, which is reached on loopback only.
    """
    if (folder / "ca.key").exists():
        raise StoreError(
            f"{folder} has an authority already, and a new one would make its certificates "
            "worthless. Choose another folder."
        )
    folder.mkdir(parents=True, exist_ok=True)
    key, name = ec.generate_private_key(ec.SECP384R1()), _name("fleet authority")
    authority = (
        _certificate(name, name, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(_usage(signs=True), critical=True)
        .sign(key, hashes.SHA384())
    )
    _write_certificate(folder / "ca.crt", authority)
    _write_secret(folder / "ca.key", key, serialization.PrivateFormat.PKCS8)
    for file, names in (("server", hosts), ("superlink", LOOPBACK)):
        server_key = ec.generate_private_key(ec.SECP384R1())
        hosts_extension = x509.SubjectAlternativeName([_host(host) for host in names])
        certificate = _sign(
            folder,
            names[0],
            server_key.public_key(),
            ExtendedKeyUsageOID.SERVER_AUTH,
            hosts_extension,
        )
        _write_certificate(folder / f"{file}.crt", certificate)
        _write_secret(folder / f"{file}.key", server_key, serialization.PrivateFormat.PKCS8)


def certify_node(folder: Path, public: Path, certificate: Path) -> None:
    """Writes a client certificate for a node's public key, signed by the authority in a folder."""
    try:
        key = serialization.load_ssh_public_key(public.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise InputError(f"{public} is not a public key that can be read: {error}.") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise InputError(
            f"{public} is not an ECDSA key, which Flower requires: "
            "ssh-keygen -t ecdsa -b 384 -N '' -f node"
        )
    if not (folder / "ca.key").exists():
        raise InputError(f"{folder} has no ca.key: 'fedensemble fleet authority' creates one.")
    _write_certificate(
        certificate, _sign(folder, public.stem, key, ExtendedKeyUsageOID.CLIENT_AUTH)
    )


def make_node_key(path: Path) -> None:
    """Writes a node's private key and `path`.pub, like `ssh-keygen -t ecdsa -b 384`.

    The private key never leaves the node's machine.
    """
    _write_pair(path, ec.generate_private_key(ec.SECP384R1()))


def make_operator_key(path: Path) -> None:
    """Writes an operator's key for signing apps and `path`.pub, like `ssh-keygen -t ed25519`."""
    _write_pair(path, ed25519.Ed25519PrivateKey.generate())


def _write_pair(path: Path, key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_secret(path, key, serialization.PrivateFormat.OpenSSH)
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    Path(f"{path}.pub").write_bytes(public + b"\n")


def _sign(
    folder: Path,
    name: str,
    key: ec.EllipticCurvePublicKey,
    use: ObjectIdentifier,
    *extensions: x509.ExtensionType,
) -> x509.Certificate:
    """Returns a certificate signed by the authority in a folder.

    Args:
        use: extended key usage, server or client. It keeps a client from posing as the server.
    """
    authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    secret = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), password=None)
    public = authority.public_key()
    if not isinstance(secret, ec.EllipticCurvePrivateKey) or not isinstance(
        public, ec.EllipticCurvePublicKey
    ):
        raise InputError(f"The authority in {folder} has another kind of key than ECDSA.")
    builder = _certificate(_name(name), authority.subject, key)
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    return (
        builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(public),
            critical=False,
        )
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([use]), critical=True)
        .sign(secret, hashes.SHA384())
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _certificate(
    name: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))  # clocks may differ
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
    )


def _usage(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _write_certificate(path: Path, certificate: x509.Certificate) -> None:
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _write_secret(
    path: Path,
    key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey,
    form: serialization.PrivateFormat,
) -> None:
    content = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    # Create the file with mode 0600, so that it is never readable by other users.
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
