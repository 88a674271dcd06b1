"""The index on the Redis that `up` would start: the contract, and what only a real server shows."""

from tests.unit.index.contract_suite import *  # noqa: F403
from tests.unit.index.host_tier_suite import *  # noqa: F403

from .damage_suite import *  # noqa: F403
from .redis_suite import *  # noqa: F403
