"""Certificates made for one test: a CA, and the certificates that it signs."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import grpc
from blockyard.proto.security.tls_files import SessionTls
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = timedelta(days=1)
USES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("encipher_only", "decipher_only"),
)
MAY_SIGN = x509.KeyUsage(**dict.fromkeys(USES, False), key_cert_sign=True, crl_sign=True)
"""Key usage of a CA. Python 3.13 rejects a CA without it, and a certificate that does not name its CA's key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """PEM files."""

    cert: str
    key: str


class Authority:
    """A CA in a folder: `ca` is its certificate's file."""

    def __init__(self, folder: Path, name: str = "test-ca", *, ends_in: timedelta = 30 * DAY) -> None:
        self._folder, self._name = folder, _named(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        constraint = x509.BasicConstraints(ca=True, path_length=None)
        certificate = (
            _builder(self._name, self._name, self._key, until=datetime.now(UTC) + ends_in, lasts=60 * DAY)
            .add_extension(constraint, critical=True)
            .add_extension(MAY_SIGN, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.ca = str(folder / f"{name}.pem")
        Path(self.ca).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def pair(
        self,
        name: str,
        *,
        has_expired: bool = False,
        ends_in: timedelta = DAY,
        lasts: timedelta = 3 * DAY,
        dns: str = "localhost",
        address: str = "127.0.0.1",
    ) -> Pair:
        """Write a certificate `name` for `dns` and `address`. It is valid for `lasts`, and ends `ends_in` from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        until = datetime.now(UTC) + (-DAY if has_expired else ends_in)
        names = [x509.DNSName(dns), x509.IPAddress(ip_address(address))]
        certificate = (
            _builder(_named(name), self._name, key, until=until, lasts=lasts)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )
        cert_file, key_file = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        key_file.touch(mode=0o600)
        key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return Pair(cert=str(cert_file), key=str(key_file))


def unchecked(ca: str, own: Pair | SessionTls) -> grpc.ChannelCredentials:
    """Return a client's credentials, without a check of its certificate."""
    return grpc.ssl_channel_credentials(*(Path(file).read_bytes() for file in (ca, own.key, own.cert)))


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    *,
    until: datetime,
    lasts: timedelta,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(until - lasts)
        .not_valid_after(until)
    )
