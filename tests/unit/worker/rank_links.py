"""Rank 0 without processes for the others: tests stand at the other ends of its links."""

import threading
from typing import Any

from blockyard.proto.naming.code_version import code_version
from blockyard.proto.security.peer_sockets import peer_contexts
from blockyard.worker.config import EngineConfig
from blockyard.worker.parallel.link import Kind, Link, connected
from blockyard.worker.ranks import RankLeader
from blockyard.worker.sequences.sampling_params import SamplingParams

from .token_engines import DEMO

SECRET = "the ranks' secret"
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PROMPTS = ["def add(a, b):\n", "import os\n", "class Queue:\n    " * 20]
END_SECONDS = 60.0


def settings(**changes: Any) -> dict[str, Any]:
    return {"device": "cpu", "dtype": "float32", "kv_cache_memory": 2**24, "max_model_len": 256} | changes


def leader(size: int = 2) -> RankLeader:
    config = EngineConfig(model=str(DEMO), engine="simulated", **settings(tensor_parallel_size=size))
    return RankLeader(config, secret=SECRET, cluster="c")


def joined(own: RankLeader, rank: int) -> Link:
    """Return the other end of a link to rank 0, which has been told that this is `rank`."""
    contexts = peer_contexts(None, secret=SECRET, cluster="c ranks")
    assert contexts is not None
    link = connected("127.0.0.1", int(own.address.rpartition(":")[2]), contexts, END_SECONDS)
    link.send_json(Kind.HELLO, rank=rank, code=code_version())
    return link


def connect_with(own: RankLeader, *ranks: int) -> list[Link]:
    """Connect rank 0 with links for these ranks, which come in this order."""
    found: list[Link] = []

    def come() -> None:
        for rank in ranks:
            found.append(joined(own, rank))
            found[-1].expect(Kind.START, END_SECONDS)
            found[-1].send_json(Kind.MAPPED, is_mapped=True)

    thread = threading.Thread(target=come)
    thread.start()
    own.connect(END_SECONDS)
    thread.join(END_SECONDS)
    for link in found:
        link.expect(Kind.GO, END_SECONDS)
    return found
