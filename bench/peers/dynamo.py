"""Dynamo's simulator (`ai-dynamo-runtime`, 1.6.1) on one of our traces: the share of prompt tokens that it reuses.

Owns the check of the trace, the settings, and the names of the results. bench/peers/dynamo_run.py calls the simulator
in the peer's Python. Its behaviour, found by experiment:

- Each of `hash_ids` names `trace_block_tokens` tokens. The engine cuts the same tokens into blocks of its own size.
- Reuse = prompt tokens found cached at admission / prompt tokens. Outputs take blocks as well.
- A pass takes 4.21e-7 n^2 + 0.01518 n + 16.5 ms for n new prompt tokens. Decodes take -25.7 a^2 + 54.0 a + 5.7 ms if
  their contexts sum to the share a of the pool. So a smaller pool is a slower engine. `speedup_ratio` divides both.
- Its router minimises `prefill_load_scale` x (queued + own uncached prompt tokens) / block size + active blocks, where
  shared blocks count once. It knows a prefix only after its computation.
- Ties are broken at random, without a seed. The reuse of `kv` differs by about 0.02 between runs of one trace; that of
  `round_robin` does not differ.
"""

import json
import math
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

RouterMode = Literal["kv", "round_robin"]
TRACE_FIELDS = frozenset({"timestamp", "input_length", "output_length", "hash_ids"})
TIMEOUT_SECONDS = 900.0
_SCRIPT = Path(__file__).with_name("dynamo_run.py")


class EngineTiming(TypedDict, total=False):
    """Settings of Dynamo's mock engine, under its own names. Missing settings keep their defaults."""

    speedup_ratio: float
    decode_speedup_ratio: float
    """Speed-up of decodes, on top of `speedup_ratio`."""
    max_num_seqs: int
    """Default: 256."""
    max_num_batched_tokens: int
    """Default: 8,192."""
    timing_model: Mapping[str, Any]
    """`{"type": "polynomial"}`, or `{"type": "fixed", "prefill_ms": .., "decode_ms": ..}` for a fixed time per pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerResult:
    reuse: float
    """Prompt tokens found in the cache / prompt tokens."""
    ttft_p50_ms: float
    ttft_p99_ms: float
    duration_s: float
    """Simulated time from the first arrival to the last token."""
    raw: Mapping[str, Any]
    """Complete summary of the peer, and its `version`."""


def run_dynamo(
    trace: Path,
    *,
    python: Path,
    num_workers: int,
    router_mode: RouterMode,
    block_size: int,
    num_gpu_blocks: int,
    trace_block_tokens: int,
    prefill_load_scale: float = 1.0,
    **timing: Unpack[EngineTiming],
) -> PeerResult:
    """Replay the trace once in Dynamo's simulator.

    Raise ValueError for a Python without Dynamo, an invalid trace, rejected settings, or requests that were not served.
    Raise OSError if the trace cannot be read.
    """
    num_requests = check_trace(trace.read_text(encoding="utf-8"), trace_block_tokens)
    request = {
        "trace": str(trace.resolve()),
        "trace_block_tokens": trace_block_tokens,
        "num_workers": num_workers,
        "router_mode": "kv_router" if router_mode == "kv" else router_mode,
        "router": {"prefill_load_scale": prefill_load_scale},
        "engine": {"block_size": block_size, "num_gpu_blocks": num_gpu_blocks, **timing},
    }
    return read_answer(_ask(python, json.dumps(request)), num_requests)


def check_trace(text: str, trace_block_tokens: int) -> int:
    """Check a trace and return its number of requests. Raise ValueError if it is invalid.

    Dynamo accepts some traces that are rejected here, but gives them another meaning. It ignores ids beyond the
    prompt's end, and lines of one session wait for each other.
    """
    if trace_block_tokens < 1:
        raise ValueError(f"trace_block_tokens must be at least 1, not {trace_block_tokens}")
    lines = text.splitlines()
    if not lines:
        raise ValueError("the trace has no requests")
    for number, line in enumerate(lines, start=1):
        try:
            _check_request(json.loads(line), trace_block_tokens)
        except json.JSONDecodeError as error:
            raise ValueError(f"trace line {number} is not JSON: {error}") from None
        except ValueError as error:
            raise ValueError(f"trace line {number} {error}") from None
    return len(lines)


def _check_request(entry: Any, trace_block_tokens: int) -> None:
    if not isinstance(entry, dict) or entry.keys() != TRACE_FIELDS:
        raise ValueError(f"must have just the fields {', '.join(sorted(TRACE_FIELDS))}")
    length, hash_ids = entry["input_length"], entry["hash_ids"]
    if not isinstance(length, int) or length < 1:
        raise ValueError(f"has the input_length {length!r}, which is not a number of tokens")
    if not isinstance(hash_ids, list):
        raise ValueError("has hash_ids that are not a list")
    expected = math.ceil(length / trace_block_tokens)
    if len(hash_ids) != expected:
        raise ValueError(
            f"has {len(hash_ids)} hash_ids, but {length} tokens in blocks of {trace_block_tokens} need {expected}"
        )


def read_answer(answer: str, num_requests: int) -> PeerResult:
    """Parse the peer's answer. Raise ValueError if it is an error, or if not every request was served.

    The peer's figures leave out requests that were not served.
    """
    try:
        document = json.loads(answer)
    except json.JSONDecodeError:
        raise ValueError(f"Dynamo's simulator did not answer with JSON: {answer[:200]!r}") from None
    if "error" in document:
        raise ValueError(document["error"])
    summary: dict[str, Any] = document["summary"]
    if summary["completed_requests"] != num_requests:
        raise ValueError(
            f"Dynamo's simulator served {summary['completed_requests']} of {num_requests} requests: "
            "the others do not fit into a worker's blocks"
        )
    return PeerResult(
        reuse=summary["prefix_cache_reused_ratio"],
        ttft_p50_ms=summary["median_ttft_ms"],
        ttft_p99_ms=summary["p99_ttft_ms"],
        duration_s=summary["duration_ms"] / 1000,
        raw={**summary, "version": document["version"]},
    )


def _ask(python: Path, request: str) -> str:
    # -I isolates: neither this folder nor our PYTHONPATH may hide the peer's packages.
    command = [str(python), "-I", str(_SCRIPT)]
    environment = {"DYN_LOG": "error", **os.environ}
    try:
        done = subprocess.run(
            command, input=request, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, env=environment
        )
    except OSError as error:
        raise ValueError(
            f"{python} cannot be run: give a Python that has ai-dynamo-runtime ({error})"
        ) from None
    except subprocess.TimeoutExpired:
        raise ValueError(f"Dynamo's simulator took more than {TIMEOUT_SECONDS:g} s for this trace") from None
    if done.returncode:
        raise ValueError(f"Dynamo's simulator ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout
