"""One house for all hostile tests: their requests come one after another, and each must leave the house as it was."""

from collections.abc import Iterator

import pytest

from .rig import House, running_house


@pytest.fixture(scope="package")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with running_house(tmp_path_factory.mktemp("house")) as built:
        yield built
        built.check_logs()
