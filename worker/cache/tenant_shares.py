"""Tenant shares: how much of a cache each tenant holds, and which tenant gives up what when room is needed.

Each cached thing (a block, or a name in host memory) is on one tenant's account. It is in use, or offered: unused, and
to be evicted when its turn comes. The next to be evicted belongs to the tenant that holds most among those that offer
any. Let `n` tenants offer something. One that holds at most an n-th of what they hold loses nothing while another holds
more. A tenant alone has the whole cache. Things in use count too: a tenant that fills the cache with running requests
pays with its own cached blocks.

All is O(1), `give` amortised O(log tenants). An account that holds nothing is dropped. The block pool and the host
cache keep which thing is on which account, and choose which of an account's things goes.
"""

from collections import OrderedDict
from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from blockyard.worker.cache.pauses import Pauses
from blockyard.worker.sequences.identifiers import TenantId

Key = TypeVar("Key", bound=Hashable)


class Account(Generic[Key]):
    """The things that one tenant holds."""

    __slots__ = ("num_held", "offered", "pauses", "tenant")

    def __init__(self, tenant: TenantId, num_queues: int = 1) -> None:
        self.tenant = tenant
        self.num_held = 0
        self.offered = tuple(OrderedDict[Key, None]() for _ in range(num_queues))
        """Queues of unused things, the least recently used first. After adding to one, call `TenantShares.offers`."""
        self.pauses = Pauses[Key](num_queues)
        """Other unused things, which are offered too. After adding one, call `TenantShares.offers`."""

    @property
    def num_offered(self) -> int:
        return self.pauses.num + sum(map(len, self.offered))

    @property
    def offers_any(self) -> bool:
        return any(self.offered) or self.pauses.num > 0


class TenantShares(Generic[Key]):
    """Accounts by tenant, each with `num_queues` queues, and the order among them."""

    def __init__(self, num_queues: int = 1) -> None:
        self._num_queues = num_queues
        self._accounts: dict[TenantId, Account[Key]] = {}
        self._alone: Account[Key] | None = None
        """The only account. While there is one, no order is needed."""
        self._ranking: list[tuple[int, TenantId]] = []
        """A heap of (minus the number of things held, tenant). Outdated entries are dropped when they surface."""
        self._changed: set[TenantId] = set()
        """Tenants with a current entry that may be missing from the ranking."""

    def __len__(self) -> int:
        return len(self._accounts)

    def num_held(self) -> dict[TenantId, int]:
        """Return the number of things held, by tenant."""
        return {tenant: account.num_held for tenant, account in self._accounts.items()}

    def num_offered(self, tenant: TenantId) -> int:
        account = self._accounts.get(tenant)
        return 0 if account is None else account.num_offered

    def hold(self, tenant: TenantId) -> Account[Key]:
        """Count one more thing in use by the tenant, and return its account."""
        account = self._accounts.get(tenant) or self._open(tenant)
        account.num_held += 1
        if self._alone is None:
            self._changed.add(tenant)
        return account

    def drop(self, account: Account[Key]) -> None:
        """Count one thing less on the account. The caller has taken it out of `offered`."""
        account.num_held -= 1
        if not account.num_held:
            self._close(account)
        elif self._alone is None:
            self._changed.add(account.tenant)

    def offers(self, account: Account[Key]) -> None:
        """Note that something was added to the account's `offered`."""
        if self._alone is None:
            self._changed.add(account.tenant)

    @property
    def can_give(self) -> bool:
        """Return whether anything is offered."""
        account = self._alone or self._largest()
        return account is not None and account.offers_any

    def give(self) -> Account[Key]:
        """Count one thing less on the account that loses the next one, and return the account. The caller takes one
        out of `offered`. Something must be offered."""
        account = self._alone
        if account is None:
            account = self._largest()
            assert account is not None, "nothing is offered"
            self._changed.add(account.tenant)
        account.num_held -= 1
        if not account.num_held:
            self._close(account)
        return account

    def _largest(self) -> Account[Key] | None:
        """Return the account that holds most of those that offer anything. Ties are resolved the same way each time."""
        accounts, ranking = self._accounts, self._ranking
        if len(ranking) > 4 * len(accounts) + 16:
            ranking[:] = [(-account.num_held, tenant) for tenant, account in accounts.items()]
            heapify(ranking)
        else:
            for tenant in self._changed:
                heappush(ranking, (-accounts[tenant].num_held, tenant))
        self._changed.clear()
        while ranking:
            count, tenant = ranking[0]
            account = accounts.get(tenant)
            if account is not None and account.num_held == -count and account.offers_any:
                return account
            heappop(ranking)
        return None

    def _open(self, tenant: TenantId) -> Account[Key]:
        account = self._accounts[tenant] = Account(tenant, self._num_queues)
        self._alone = account if len(self._accounts) == 1 else None
        self._changed.update(self._accounts if len(self._accounts) == 2 else ())
        return account

    def _close(self, account: Account[Key]) -> None:
        del self._accounts[account.tenant]
        self._changed.discard(account.tenant)
        if len(self._accounts) < 2:
            self._alone = next(iter(self._accounts.values()), None)
            self._ranking.clear()
            self._changed.clear()

    def check_invariants(self) -> None:
        """Raise AssertionError where a tenant would never be asked to give. O(accounts)."""
        assert (self._alone is not None) == (len(self._accounts) == 1)
        for tenant, account in self._accounts.items():
            assert self.num_offered(tenant) <= account.num_held > 0
            is_ranked = (-account.num_held, tenant) in self._ranking or tenant in self._changed
            assert is_ranked or not account.offers_any or account is self._alone
