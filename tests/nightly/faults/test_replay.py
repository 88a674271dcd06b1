"""Replays keep grammar, seed, penalties, several outputs, log-probabilities, beams and stop texts. They run on the demo
model itself, in deterministic mode, so that tokens can be compared."""

import json
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.system.load import CANARY, Stream, answers, load, until_ready
from tests.system.processes import DETERMINISTIC, Processes, processes

from .invariants import Baseline, all_is_as_before, each_ended_once, same_tokens
from .rig import cost, whole

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "sizes": {"type": "array", "minItems": 12, "maxItems": 16, "items": {"type": "integer"}},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
REGEX = "(ab|cd){60}!"
GAP_SECONDS = 5.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with processes(tmp_path_factory.mktemp("replay")) as cluster:
        # The worker that dies guesses tokens where its measured times allow trials. That must change no token.
        guesses = {"w0": ("--speculation", "ngram"), "w1": ()}
        workers = [cluster.add_worker(name, *DETERMINISTIC, *options) for name, options in guesses.items()]
        addresses = [worker.address for worker in workers]
        # It only suspects a worker that is frozen for a while, and does not give it up.
        cluster.start(*workers, cluster.add_router("r0", "--lost-seconds", "60", workers=addresses))
        yield cluster


def kinds() -> dict[str, Stream]:
    """One request of each kind."""
    settings: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "seed": {"temperature": 0.9, "seed": 11, "top_p": 0.9},
        "penalties": {
            "seed": 5,
            "repetition_penalty": 1.3,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.2,
        },
        "n": {"seed": 3, "n": 2},
        "logprobs": {"seed": 4, "logprobs": 3},
        "schema": {"seed": 6, "json_schema": SCHEMA, "ignore_eos": False, "max_tokens": 400},
        "regex": {"seed": 8, "regex": REGEX, "ignore_eos": False, "max_tokens": 200},
        "beams": {"beam_width": 3, "n": 2},
    }
    return {
        kind: Stream(
            request_id=f"{kind}-{time.monotonic_ns()}",
            prompt=f"def {kind}(x): # {CANARY}",
            arguments={"max_tokens": 160, "ignore_eos": True, **setting},
        )
        for kind, setting in settings.items()
    }


@pytest.mark.fault(18)
async def test_a_replay_goes_on_where_grammar_draws_and_penalties_were(
    cluster: Processes, measured: dict[str, Any]
) -> None:
    async with whole(cluster) as client:
        undisturbed = kinds()
        await answers(client, list(undisturbed.values()))
        baseline = Baseline.of(cluster)
        disturbed = kinds()
        # All of them are on one worker: the other is frozen until they have begun.
        other = cluster.workers["w1"]
        other.signal(signal.SIGSTOP)
        await until_ready(client, "w0")
        async with load(client, list(disturbed.values())) as running:
            for kind in disturbed.keys() - {"beams"}:
                await disturbed[kind].until_tokens(5)
            # Frozen, it computes nothing while the other wakes. The router does not give it up meanwhile.
            cluster.workers["w0"].signal(signal.SIGSTOP)
            other.signal(signal.SIGCONT)
            await until_ready(client, "w1")
            running_kinds = {kind for kind, stream in disturbed.items() if stream.ended is None}
            at = time.monotonic()
            cluster.workers["w0"].kill()
            finished = await running.finished()
        touched = [disturbed[kind] for kind in running_kinds]
        measured.update(cost(touched, "w0", at=at), note=", ".join(sorted(running_kinds)))
        # Beams send nothing before they end.
        streaming = [disturbed[kind] for kind in running_kinds - {"beams"}]
        # From the death on: before it they waited for a frozen worker, which the test itself caused.
        measured["recovery_seconds"] = max(
            min(time for time in stream.arrivals if time > at) - at for stream in streaming
        )
        assert measured["migrated"] == len(touched)
        assert running_kinds == disturbed.keys()
        same_tokens(finished, list(undisturbed.values()))
        each_ended_once(finished)
        assert set(json.loads(disturbed["schema"].text[0])) == set(SCHEMA["required"])
        assert re.fullmatch(REGEX, disturbed["regex"].text[0])
        assert {kind: stream.text for kind, stream in disturbed.items()} == {
            kind: stream.text for kind, stream in undisturbed.items()
        }
        assert measured["recovery_seconds"] < GAP_SECONDS
        await all_is_as_before(cluster, baseline, client)
