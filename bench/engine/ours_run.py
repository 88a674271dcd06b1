"""Our engine as a system under test, in its own process like the peers: see peers/protocol.py.

python -m bench.engine.ours_run
"""

from collections.abc import Iterable, Sequence
from itertools import count

import torch
from blockyard.proto.runtime.garbage_collection import kept_out_of_garbage_collection
from blockyard.worker.engine import Engine
from blockyard.worker.sequences.identifiers import RequestId

from bench.engine.build import EngineSettings, build_engine, engine_request
from bench.engine.peers.protocol import Loaded, Settings, serve, stepped


class Ours:
    """Our engine. Without `shares`, block names of requests have different roots, as if there were no prefix cache."""

    def __init__(self, engine: Engine, *, shares: bool) -> None:
        self._engine = engine
        self._shares = shares
        self._numbers: dict[RequestId, int] = {}
        self._salts = count(1)

    def add(self, number: int, token_ids: list[int], max_tokens: int) -> None:
        salt = "" if self._shares else str(next(self._salts))
        request = engine_request(token_ids, max_tokens, salt=salt)
        self._numbers[self._engine.submit(request)] = number

    def step(self) -> Iterable[tuple[int, Sequence[int]]]:
        outputs = self._engine.step().outputs
        for output in outputs:
            if not output.token_ids:
                raise RuntimeError(f"the engine failed on a request: {output.state}")
        return [(self._numbers[output.request_id], output.token_ids) for output in outputs]


def load(settings: Settings) -> Loaded:
    shares = settings.pop("shares")
    engine = build_engine(EngineSettings(**settings))
    backend = getattr(engine.runner, "backend").name  # noqa: B009 - of TorchRunner; the protocol has none
    versions = {"torch": torch.__version__}
    return stepped(Ours(engine, shares=shares), versions, f"kernel backend {backend}")


if __name__ == "__main__":
    with kept_out_of_garbage_collection():
        serve(load)
