"""Results of a cluster's secret: certificates that only its processes can show, and signatures of records."""

from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta

import pytest
from blockyard.proto.index.contract import Incarnation, WorkerId, WorkerRecord
from blockyard.proto.security.cluster_identity import (
    CERTIFICATE_LIFE,
    CLOCK_SKEW,
    Identity,
    is_genuine,
    issue_identity,
    record_proof,
)
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec

RECORD = WorkerRecord(
    worker_id=WorkerId("worker-0"),
    incarnation=Incarnation("1f"),
    address="10.0.0.1:50061",
    fingerprint="ab",
    block_size=16,
)


def proof(record: WorkerRecord, secret: str = "s", cluster: str = "c") -> str:
    return record_proof(record, secret=secret, cluster=cluster)


def identity(secret: str = "s", cluster: str = "c", **facts: datetime) -> Identity:
    return issue_identity(secret, cluster, dns_name="a-name", **facts)


def certificate(pem: bytes) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pem)


def is_issued_by(one: Identity, other: Identity) -> bool:
    try:
        certificate(one.certificate).verify_directly_issued_by(certificate(other.authority))
    except InvalidSignature:
        return False
    return True


def test_processes_of_one_secret_recognise_each_other_and_no_others() -> None:
    ours, also_ours = identity(), identity()
    assert is_issued_by(ours, also_ours)
    assert is_issued_by(also_ours, ours)
    for stranger in (identity(secret="t"), identity(cluster="d"), identity(secret="sc", cluster="")):
        assert not is_issued_by(stranger, ours)
        assert not is_issued_by(ours, stranger)


def test_each_identity_has_a_key_of_its_own_and_none_holds_the_authoritys() -> None:
    one, other = identity(), identity()
    assert one.key != other.key
    public = certificate(one.certificate).public_key()
    authority = certificate(one.authority).public_key()
    assert isinstance(public, ec.EllipticCurvePublicKey)
    assert isinstance(authority, ec.EllipticCurvePublicKey)
    assert public.public_numbers() != authority.public_numbers()
    assert "key" not in repr(one)
    constraints = certificate(one.certificate).extensions.get_extension_for_class(x509.BasicConstraints)
    assert not constraints.value.ca, "it could issue certificates itself"


def test_a_certificate_is_valid_for_days_and_a_little_before() -> None:
    now = datetime(2026, 1, 31, 12, tzinfo=UTC)
    made = certificate(identity(now=now).certificate)
    assert made.not_valid_before_utc == now - CLOCK_SKEW
    assert made.not_valid_after_utc == now + CERTIFICATE_LIFE
    authority = certificate(identity(now=now).authority)
    assert authority.not_valid_before_utc < now < authority.not_valid_after_utc - timedelta(days=365)


@pytest.mark.parametrize("name", [field.name for field in fields(WorkerRecord) if field.name != "proof"])
def test_a_proof_is_of_every_fact_of_its_record(name: str) -> None:
    signed = replace(RECORD, proof=proof(RECORD))
    assert is_genuine(signed, secret="s", cluster="c")
    changed = replace(signed, **{name: 32 if name == "block_size" else "other"})
    assert not is_genuine(changed, secret="s", cluster="c")


def test_a_proof_is_of_one_secret_one_cluster_and_each_fact_by_itself() -> None:
    signed = replace(RECORD, proof=proof(RECORD))
    assert not is_genuine(signed, secret="t", cluster="c")
    assert not is_genuine(signed, secret="s", cluster="d")
    for forged in ("", "0" * 64, proof(RECORD)[:-2], "\ufffd"):
        assert not is_genuine(replace(RECORD, proof=forged), secret="s", cluster="c")
    shifted = replace(RECORD, worker_id=WorkerId("worker-01"), incarnation=Incarnation("f"))
    assert proof(shifted) != proof(RECORD)
