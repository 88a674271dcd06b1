"""The fixtures of tests/unit/openai."""

from tests.unit.openai.conftest import batch_client as batch_client
from tests.unit.openai.conftest import batching as batching
from tests.unit.openai.conftest import client as client
from tests.unit.openai.conftest import gateway as gateway
from tests.unit.openai.conftest import tokens as tokens
from tests.unit.openai.conftest import worker as worker
