"""The twin in memory keeps the contract of every PrefixIndex."""

from .contract_suite import *  # noqa: F403
from .host_tier_suite import *  # noqa: F403
