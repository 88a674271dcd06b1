"""The fixtures of tests/unit/openai, and one real router with a real worker for the whole folder."""

from collections.abc import Iterator

import pytest
from blockyard.router import sealed_records

from tests.unit.openai.conftest import batch_client as batch_client
from tests.unit.openai.conftest import batching as batching
from tests.unit.openai.conftest import client as client
from tests.unit.openai.conftest import gateway as gateway
from tests.unit.openai.conftest import tokens as tokens
from tests.unit.openai.conftest import worker as worker

from .rig import served


@pytest.fixture(scope="package")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the demo model: `http://HOST:PORT`."""
    batches = str(tmp_path_factory.mktemp("batches"))
    with served(tmp_path_factory.mktemp("demo"), router=("--batch-dir", batches)) as found:
        yield found


@pytest.fixture
def waiting_for_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine Redis may take longer than the half second that routers wait."""
    monkeypatch.setattr(sealed_records, "TIMEOUT_SECONDS", 20.0)
