"""Imports show that decisions are pure."""

import subprocess
import sys


def test_decisions_load_no_grpc_torch_ray_redis_or_asyncio() -> None:
    code = (
        "import sys\n"
        "import blockyard.router.admission.ledger, blockyard.router.cluster.view, blockyard.router.placement.policies\n"
        "print(sorted({'grpc', 'torch', 'ray', 'redis', 'asyncio'} & sys.modules.keys()))\n"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"
