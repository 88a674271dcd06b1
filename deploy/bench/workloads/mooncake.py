"""Traces in Mooncake's format: one JSON object per line, with a hash for each block of the prompt.

`timestamp` is in ms, `input_length` and `output_length` in tokens. Equal `hash_ids` at the same position mean an equal
prefix up to there. The format is that of the FAST'25 release; Dynamo's simulator reads it too. Owns reading and writing
of files.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Self

from blockyard.deploy.bench.workloads.requests import PlannedRequest, Run, Tokens, Workload
from blockyard.deploy.views.quantities import counted

TRACE_BLOCK_TOKENS = 512
MAX_ARRIVAL_SECONDS = 1e6
MAX_TIMESTAMP_MS = 1e15
MAX_REQUEST_TOKENS = 2**24
"""Default limit of prompt and output together, if the model's context length is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A line of a trace."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]

    @classmethod
    def of(cls, line: str) -> Self:
        """Parse a line, and ignore keys that the format does not have. Raise ValueError if it is not in the format."""
        try:
            found = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON ({error})") from None
        if not isinstance(found, dict):
            raise ValueError("not an object")
        lengths = {name: _length(found, name) for name in ("input_length", "output_length")}
        hash_ids, timestamp = _found(found, "hash_ids"), _found(found, "timestamp")
        if not isinstance(hash_ids, list) or not all(type(block) is int for block in hash_ids):
            raise ValueError("hash_ids must be a list of whole numbers")
        if type(timestamp) not in (int, float) or not 0 <= timestamp <= MAX_TIMESTAMP_MS:
            raise ValueError(
                f"timestamp must be milliseconds from 0 to {MAX_TIMESTAMP_MS:g}, not {timestamp!r}"
            )
        if not lengths["input_length"]:
            raise ValueError("input_length must be at least 1, not 0")
        return cls(timestamp=timestamp, hash_ids=hash_ids, **lengths)


def _found(entry: dict[str, Any], name: str) -> Any:
    if name not in entry:
        raise ValueError(f"not in Mooncake's format: no {name}")
    return entry[name]


def _length(entry: dict[str, Any], name: str) -> int:
    value = _found(entry, name)
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} must be a whole number of tokens, not {value!r}")
    return value


def read_trace(
    path: Path,
    *,
    block_tokens: int = TRACE_BLOCK_TOKENS,
    seconds: float | None = None,
    speed: float = 1.0,
    max_request_tokens: int = MAX_REQUEST_TOKENS,
) -> Workload:
    """Read a trace that is replayed `speed` times as fast, and only the first `seconds` of that replay if given.

    Raise ValueError with the line number for an invalid trace, and OSError.
    """
    if block_tokens < 1 or not (isfinite(speed) and speed > 0):
        raise ValueError(f"block_tokens {block_tokens} and speed {speed:g} must be above 0")
    blocks: dict[int, Run] = {}
    tokens = Tokens()
    requests: list[PlannedRequest] = []
    for number, line in enumerate(_text(path).splitlines()):
        try:
            entry = _Entry.of(line)
            arrival = entry.timestamp / 1000 / speed
            if seconds is not None and arrival >= seconds:
                break
            if not arrival < MAX_ARRIVAL_SECONDS:
                raise ValueError(
                    f"arrives {arrival:g} s after the start, the maximum is {MAX_ARRIVAL_SECONDS:g} s"
                )
            output_tokens = max(entry.output_length, 1)
            if entry.input_length + output_tokens > max_request_tokens:
                raise ValueError(
                    f"input_length {entry.input_length} and output_length {output_tokens} are more than "
                    f"{max_request_tokens} tokens together"
                )
            prompt = tuple(_prompt(entry.hash_ids, entry.input_length, block_tokens, blocks, tokens))
            requests.append(
                PlannedRequest(
                    number=number, arrival_seconds=arrival, prompt=prompt, output=tokens.run(output_tokens)
                )
            )
        except ValueError as error:
            raise ValueError(f"{path.name}, line {number + 1}: {error}") from None
    about = f"{path.stem}, {counted(len(requests), 'request')}" + (
        f", {speed:g} times as fast" if speed != 1 else ""
    )
    return Workload(name=path.stem, about=about, requests=tuple(requests))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path.name}: not a text file in UTF-8") from None


def _prompt(
    hash_ids: list[int], length: int, block_tokens: int, blocks: dict[int, Run], tokens: Tokens
) -> Iterator[Run]:
    """Yield the runs of a prompt. The last block may be partial. Tokens beyond the hashes are shared with no prompt."""
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
    """Write a workload. Raise ValueError for conversations: the format cannot express requests that follow others."""
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
