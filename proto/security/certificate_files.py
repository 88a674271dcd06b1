"""PEM files of certificates and keys: read, checked, and read again when they change.

Owns the refusal of files that cannot be used: no pair, no PEM, a certificate that has expired or is not valid yet. Does
not own what is made of the files (tls.py).
"""

import logging
import ssl
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Lock, Thread
from typing import Generic, TypeVar

from blockyard.proto.security.secret_files import read_file, read_secret_file
from cryptography import x509

logger = logging.getLogger(__name__)

WARNING_TIME = timedelta(days=14)
"""The log warns this long before a certificate expires, at each start and once a day."""
CHECK_SECONDS = 1.0
"""Files are checked at most this often, on a new connection."""
MAX_WAIT_SECONDS = 0.05
"""A caller waits this long for a check. After that it goes on with the previous result, and so do all others."""
READ_AGAIN_SECONDS = 24 * 3600.0
"""Files that have not changed are read again this often, to check their dates."""
RETRY_SECONDS = 10.0
"""Unusable files that have not changed are read again this often: the fault may have been the file server's."""

Made = TypeVar("Made")


def read_pair(key: str, cert: str) -> tuple[bytes, bytes]:
    """Return a private key and its certificate chain, in PEM and valid now. Raises ValueError that names the files."""
    pair = read_secret_file(key, "TLS key")[0], read_file(cert, "TLS certificate")
    # gRPC itself would report nothing, and fail every handshake.
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=no_password)
        chain = x509.load_pem_x509_certificates(pair[1])
    except (ssl.SSLError, ValueError):
        raise ValueError(
            f"TLS certificate {cert} and key {key} are no pair in PEM form without a password"
        ) from None
    for certificate in chain:
        _check_dates(certificate, f"TLS certificate {cert}")
    _warn_of_expiry(chain, f"TLS certificate {cert}")
    return pair


def read_ca(path: str) -> bytes:
    """Return CA certificates in PEM, of which at least one is valid now: an old and a new one may lie side by side.

    Raises ValueError that names the file.
    """
    content = read_file(path, "TLS CA")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode("ascii"))
        bundle = x509.load_pem_x509_certificates(content)
    except (ssl.SSLError, ValueError):
        raise ValueError(f"TLS CA {path} holds no certificates in PEM form") from None
    last = max(bundle, key=lambda certificate: certificate.not_valid_after_utc)
    if not any(_is_valid(certificate) for certificate in bundle):
        _check_dates(last, f"TLS CA {path}")
    _warn_of_expiry([last], f"TLS CA {path}")
    return content


def first_end(key: str, cert: str, ca: str | None) -> datetime:
    """Return when the first of these files stops to be valid. Raises ValueError as `read_pair` and `read_ca` do."""
    ends = [min(_ends(read_pair(key, cert)[1]))]
    if ca is not None:
        ends.append(max(_ends(read_ca(ca))))
    return min(ends)


def _ends(pem: bytes) -> list[datetime]:
    return [certificate.not_valid_after_utc for certificate in x509.load_pem_x509_certificates(pem)]


def no_password() -> str:
    """Raise ValueError, because the key has a password. Without this function OpenSSL would ask on the terminal."""
    raise ValueError("the key has a password")


def _is_valid(certificate: x509.Certificate) -> bool:
    return certificate.not_valid_before_utc <= datetime.now(UTC) < certificate.not_valid_after_utc


def _check_dates(certificate: x509.Certificate, what: str) -> None:
    now, begin, end = datetime.now(UTC), certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if end <= now:
        raise ValueError(f"{what} has expired on {end:%Y-%m-%d %H:%M} UTC")
    if begin > now:
        raise ValueError(f"{what} is not valid before {begin:%Y-%m-%d %H:%M} UTC")


def _warn_of_expiry(certificates: Iterable[x509.Certificate], what: str) -> None:
    end = min(certificate.not_valid_after_utc for certificate in certificates)
    if end - datetime.now(UTC) < WARNING_TIME:
        logger.warning("%s expires on %s UTC", what, f"{end:%Y-%m-%d %H:%M}")


class Reloaded(Generic[Made]):
    """A value made from files, and made again when they change. If files cannot be used, it logs that and keeps the
    previous value. Thread-safe.

    A thread of its own reads the files: on a lost file server a check may take minutes, and callers are event loops.
    """

    def __init__(self, paths: Sequence[str], make: Callable[[], Made]) -> None:
        """Make the first value. Raises what `make` raises."""
        self._paths = paths
        self._make = make
        self._lock = Lock()
        self._check: Thread | None = None
        """The check in progress, or the last one."""
        self._state = self._states()
        self._checked_at = self._read_at = time.monotonic()
        self._made = make()
        self._complaint = ""
        """Fault that the last check found. Empty: the files can be used."""

    @property
    def is_good(self) -> bool:
        """Return False from the first check that finds the files unusable until one finds them good."""
        return not self._complaint

    def current(self) -> Made:
        """Return the value made last. If the last check of the files is CHECK_SECONDS old, check them first, and wait
        for that MAX_WAIT_SECONDS at most."""
        if check := self._new_check():
            check.join(MAX_WAIT_SECONDS)
            if check.is_alive():
                self._complain(f"{self._paths[0]}: reading takes long")
        return self._made

    def _new_check(self) -> Thread | None:
        """Start a check and return its thread, or None if the last one is recent or still runs."""
        with self._lock:
            now = time.monotonic()
            is_running = self._check is not None and self._check.is_alive()
            if is_running or now - self._checked_at < CHECK_SECONDS:
                return None
            self._checked_at = now
            self._check = Thread(target=self._read_again, args=(now,), name="certificates", daemon=True)
            self._check.start()
            return self._check

    def _read_again(self, now: float) -> None:
        state = self._states()
        has_changed = state != self._state
        pause_seconds = READ_AGAIN_SECONDS if self.is_good else RETRY_SECONDS
        if not has_changed and now - self._read_at < pause_seconds:
            return
        self._state, self._read_at = state, now
        try:
            self._made = self._make()
        except (ValueError, OSError) as error:
            self._complain(str(error))
        else:
            has_changed, self._complaint = has_changed or not self.is_good, ""
            if has_changed:
                logger.info("read again: %s", ", ".join(self._paths))

    def _complain(self, complaint: str) -> None:
        if complaint != self._complaint:
            logger.error("%s: what was read before stays in use", complaint)
        self._complaint = complaint

    def _states(self) -> list[tuple[int, ...] | None]:
        """Return each file's device, inode, size, mode, owner and time of last write, or None if it is missing. Links
        are followed: a Kubernetes Secret changes by them."""
        return [_state_of(path) for path in self._paths]


def _state_of(path: str) -> tuple[int, ...] | None:
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mode, status.st_uid, status.st_mtime_ns
