"""For every test: where there is no GPU, Triton interprets its kernels, which is to be said before anything imports it;
how long threads spin on a machine crowded with processes; and where a row of the fault matrix says what it measured."""

import os
from typing import Any

import pytest
import torch

# Dozens of processes share the cores here, workers that compute among them: one that spins keeps another from its work.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A row puts in what the report shows: `failed`, `migrated` (requests), `recovery_seconds`, `note`."""
    figures: dict[str, Any] = {}
    request.node.user_properties.append(("measured", figures))
    return figures
