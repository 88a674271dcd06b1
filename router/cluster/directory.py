"""Directory: chooses the worker addresses to connect to, from records in Redis, which others may write or delete.

Owns the check of records, the bound on addresses, and when an address is dropped. Pure: it takes the pages of the
index's directory one by one. Does not own the reading of Redis (server.py) or connections (fleet.py).
"""

import random
from collections.abc import Callable

from blockyard.proto.index.contract import DirectoryPage
from blockyard.proto.security.cluster_identity import is_genuine

MAX_REPLACED = 16
"""The most addresses that one page of records replaces. Each new address is one more connection to try."""


class Directory:
    """Addresses of workers with a signed record. A pass goes from the first page to the last.

    Redis may hold more records than one read returns, and old ones too. Only a holder of the secret can sign a record,
    but anyone who has read a record can write it back.
    """

    def __init__(
        self,
        *,
        secret: str,
        cluster: str,
        max_addresses: int,
        has_failed: Callable[[str], bool],
        rng: random.Random | None = None,
    ) -> None:
        """`has_failed` tells whether the last attempt to connect to an address failed."""
        self.next_after = 0
        """Berth (an incarnation's number in the index) after which the next page begins."""
        self.num_forged = 0
        """Records without the cluster's signature: in the pass before, or in this one if it has had more."""
        self._secret = secret
        self._cluster = cluster
        self._max_addresses = max_addresses
        self._has_failed = has_failed
        self._rng = rng or random.Random()
        self._addresses: dict[str, None] = {}
        self._seen: set[str] = set()
        self._num_forged_of_pass = 0

    @property
    def addresses(self) -> frozenset[str]:
        return frozenset(self._addresses)

    def take(self, page: DirectoryPage) -> None:
        """Take the addresses of the page after `next_after`. At the end of a pass, drop those that it did not list and
        whose last connection attempt failed.

        An address that can be reached is kept, because Redis may have lost or hidden its record.
        """
        genuine = [
            record.address
            for record in page.records
            if is_genuine(record, secret=self._secret, cluster=self._cluster)
        ]
        self._num_forged_of_pass += len(page.records) - len(genuine)
        self._seen.update(genuine)
        self._admit([address for address in dict.fromkeys(genuine) if address not in self._addresses])
        self.num_forged = max(self.num_forged, self._num_forged_of_pass)
        self.next_after = page.next_after
        if page.next_after == 0:
            self._end_pass()

    def _admit(self, new: list[str]) -> None:
        """Add new addresses. At the bound, they replace addresses that cannot be reached, at random, so that each new
        one is tried sooner or later."""
        excess = len(self._addresses) + len(new) - self._max_addresses
        if excess > 0:
            failed = [address for address in self._addresses if self._has_failed(address)]
            for address in self._rng.sample(failed, min(len(failed), excess, MAX_REPLACED)):
                del self._addresses[address]
            room = self._max_addresses - len(self._addresses)
            new = self._rng.sample(new, min(len(new), room))
        self._addresses |= dict.fromkeys(new)

    def _end_pass(self) -> None:
        kept = (
            address for address in self._addresses if address in self._seen or not self._has_failed(address)
        )
        self._addresses = dict.fromkeys(kept)
        self._seen.clear()
        self.num_forged, self._num_forged_of_pass = self._num_forged_of_pass, 0
