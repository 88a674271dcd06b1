"""Proofs that a process knows the cluster's secret, which itself never leaves the process.

Owns the certificate authority, with a key that follows from the secret, and the signatures of the records by which
workers introduce themselves. All processes of a cluster derive the same authority, and each issues certificates to
itself. So TLS with certificates on both sides proves that both know the secret, before either sends a byte of content.
Does not own which ports ask for it (tls.py) or where the records are kept (index/contract.py).
"""

import hashlib
import hmac
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache

from blockyard.proto.index.contract import WorkerRecord
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CERTIFICATE_LIFE = timedelta(days=8)
"""Time for which a certificate is valid. Processes replace their own at least daily, and check one only when a
connection begins."""
CLOCK_SKEW = timedelta(days=1)
"""Largest tolerated difference of two nodes' clocks: a certificate is valid from this long before it is issued."""
_AUTHORITY_NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "blockyard session authority")])
_AUTHORITY_LIFE = datetime(2020, 1, 1, tzinfo=UTC), datetime(2120, 1, 1, tzinfo=UTC)
"""The same in each process. The authority ends with the secret, not by a date."""
_CURVE = ec.SECP256R1()
_CURVE_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_SCRYPT_COST = 2**14
"""Takes about 50 ms and 16 MiB, once a process. An attacker with a certificate can try secrets no faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A certificate, its key, and the authority that must have signed the other side's certificate. PEM."""

    key: bytes
    certificate: bytes
    authority: bytes

    def __repr__(self) -> str:
        return "Identity(...)"


def issue_identity(secret: str, cluster: str, *, dns_name: str, now: datetime | None = None) -> Identity:
    """Return a fresh identity for either side of a connection, valid for `CERTIFICATE_LIFE`."""
    authority_key, authority = _authority(secret, cluster)
    key = ec.generate_private_key(_CURVE)
    issued = now or datetime.now(UTC)
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        _builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, dns_name)]), key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(issued - CLOCK_SKEW)
        .not_valid_after(issued + CERTIFICATE_LIFE)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(dns_name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    return Identity(key=_key_pem(key), certificate=_pem(certificate), authority=_pem(authority))


def record_proof(record: WorkerRecord, *, secret: str, cluster: str) -> str:
    """Return the signature of a record in hexadecimal. Only a process that knows the secret can make it."""
    facts = (record.worker_id, record.incarnation, record.address, record.fingerprint, str(record.block_size))
    message = b"".join(len(part).to_bytes(4) + part for part in (fact.encode() for fact in facts))
    return _derived(secret, cluster, b"worker record\0" + message).hex()


def is_genuine(record: WorkerRecord, *, secret: str, cluster: str) -> bool:
    """Return whether a process that knows the secret wrote this record. Its worker may have ended since."""
    proof = record_proof(record, secret=secret, cluster=cluster)
    return hmac.compare_digest(proof.encode(), record.proof.encode())


def records_key(secret: str, cluster: str) -> bytes:
    """Return the key from which those of sealed records in Redis are derived."""
    return _derived(secret, cluster, b"sealed records")


def answers_key(secret: str, cluster: str) -> bytes:
    """Return the key from which those of sessions' answers in Redis are derived."""
    return _derived(secret, cluster, b"answers of sessions")


def adapters_key(secret: str, cluster: str) -> bytes:
    """Return the key from which those of the models' logs of adapters in Redis are derived."""
    return _derived(secret, cluster, b"log of adapters")


@lru_cache(maxsize=8)
def _root_key(secret: str, cluster: str) -> bytes:
    salt = b"blockyard cluster identity 1\0" + cluster.encode()
    return hashlib.scrypt(secret.encode(), salt=salt, n=_SCRYPT_COST, r=8, p=1, dklen=32)


def _derived(secret: str, cluster: str, purpose: bytes) -> bytes:
    return hmac.digest(_root_key(secret, cluster), purpose, "sha256")


@lru_cache(maxsize=8)
def _authority(secret: str, cluster: str) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    # 512 bits modulo the order: the numbers are uniformly distributed.
    number = int.from_bytes(b"".join(_derived(secret, cluster, b"authority %d" % half) for half in (1, 2)))
    key = ec.derive_private_key(1 + number % (_CURVE_ORDER - 1), _CURVE)
    begin, end = _AUTHORITY_LIFE
    certificate = (
        _builder(_AUTHORITY_NAME, key)
        .serial_number(1)
        .not_valid_before(begin)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    return key, certificate


def _builder(subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(_AUTHORITY_NAME)
        .public_key(key.public_key())
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
