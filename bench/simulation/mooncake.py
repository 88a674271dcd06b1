"""Traces in Mooncake's format: one JSON object a line, with a hash for each block of the prompt.

`timestamp` in ms, `input_length` and `output_length` in tokens, `hash_ids`: equal ids at the same place mean an equal
prefix up to there (FAST'25 release; Dynamo's simulator reads the same). Owns reading and writing of files.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from bench.simulation.workloads import Run, SimulatedRequest, Tokens, Workload

TRACE_BLOCK_TOKENS = 512


def read_trace(
    path: Path,
    *,
    block_tokens: int = TRACE_BLOCK_TOKENS,
    seconds: float | None = None,
    speed: float = 1.0,
) -> Workload:
    """The first `seconds` of a trace, played `speed` times as fast. Raises ValueError for what is no trace."""
    blocks: dict[int, Run] = {}
    tokens = Tokens()
    requests: list[SimulatedRequest] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        try:
            entry = json.loads(line)
            arrival = entry["timestamp"] / 1000 / speed
            if seconds is not None and arrival >= seconds:
                break
            requests.append(
                SimulatedRequest(
                    number=number,
                    arrival_seconds=arrival,
                    prompt=tuple(
                        _prompt(entry["hash_ids"], entry["input_length"], block_tokens, blocks, tokens)
                    ),
                    output=tokens.run(max(entry["output_length"], 1)),
                )
            )
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{path.name}, line {number + 1}: not of Mooncake's format ({error!r})"
            ) from None
    about = f"{path.stem}, {len(requests)} requests" + (f", {speed:g} times as fast" if speed != 1 else "")
    return Workload(name=path.stem, about=about, requests=tuple(requests))


def _prompt(
    hash_ids: list[int], length: int, block_tokens: int, blocks: dict[int, Run], tokens: Tokens
) -> Iterator[Run]:
    """The last block may be a part of one; what no hash stands for is nobody else's."""
    left = length
    for block in hash_ids:
        run = blocks.get(block)
        if run is None:
            run = blocks[block] = tokens.run(block_tokens)
        yield Run(run.base, min(left, block_tokens))
        left -= block_tokens
        if left <= 0:
            return
    if left > 0:
        yield tokens.run(left)


def write_trace(workload: Workload, path: Path, *, block_tokens: int) -> None:
    """Raises ValueError for conversations: the format has no word for a request that waits for another's end."""
    ids: dict[tuple[int, tuple[int, ...]], int] = {}
    lines = []
    for request in workload.requests:
        if request.follows is not None:
            raise ValueError("requests that follow others cannot be written as a trace")
        token_ids, hashes, parent = request.token_ids(), [], -1
        for start in range(0, len(token_ids), block_tokens):
            block = tuple(token_ids[start : start + block_tokens])
            parent = ids.setdefault((parent, block), len(ids))
            hashes.append(parent)
        entry = {
            "timestamp": round(request.arrival_seconds * 1000),
            "input_length": len(token_ids),
            "output_length": request.output.length,
            "hash_ids": hashes,
        }
        lines.append(json.dumps(entry))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
