"""Several outputs arrive exactly once each, whatever workers do, and an output that has ended is never repeated."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from blockyard.proto.naming.block_hash import split_names, unpack_tokens
from blockyard.proto.v1 import session_pb2
from blockyard.router.cluster.events import Tokens
from blockyard.router.errors import InvalidRequest
from blockyard.router.generation.attempt import Progress
from blockyard.router.generation.joined_outputs import Outputs, TokenChunk
from blockyard.router.generation.relay import Generation
from blockyard.router.placement.scoring import Candidate
from hypothesis import given
from hypothesis import strategies as st

from .fake_worker import FakeWorker, Script, expected_tokens
from .relay_rig import Rig, generation, rig

PROMPT_TOKENS = 40


def several(n: int, **sampling: Any) -> Generation:
    made = generation(5)
    engine = session_pb2.EngineSampling(**{"max_tokens": 20, "seed": 5, "n": n, **sampling})
    return replace(made, sampling=engine, priority=-3)


async def collect(
    rig: Rig, request: Generation, *, stop_at: dict[int, int] | None = None
) -> tuple[dict[int, list[int]], dict[int, TokenChunk], list[TokenChunk]]:
    """Each output's tokens, proven contiguous, and its last chunk; all chunks. The caller ends the outputs of `stop_at`
    after so many tokens."""
    tokens: dict[int, list[int]] = defaultdict(list)
    last: dict[int, TokenChunk] = {}
    chunks = []
    stopped: set[int] = set()

    def take(chunk: TokenChunk) -> bool:
        assert chunk.offset == len(tokens[chunk.index])
        assert chunk.index not in stopped, "an output that the caller has ended"
        assert last.get(chunk.index) is None or last[chunk.index].finish is None
        tokens[chunk.index] += chunk.token_ids
        last[chunk.index] = chunk
        chunks.append(chunk)
        if len(tokens[chunk.index]) >= (stop_at or {}).get(chunk.index, 10**9):
            stopped.add(chunk.index)
        return chunk.index in stopped

    async with asyncio.timeout(10):
        await rig.relay.run(request, Progress(), take)
    await rig.until_quiet()
    return tokens, last, chunks


def all_submits(rig: Rig) -> list[session_pb2.Submit]:
    return [submit for worker in rig.workers for submit in worker.submits]


def first_then_well(script: Script, otherwise: Script | None = None) -> list[FakeWorker]:
    """Two workers, of whose submits the first one meets the script."""
    seen: list[int] = []

    def choose(submit: session_pb2.Submit) -> Script:
        seen.append(submit.handle)
        return script if len(seen) == 1 else otherwise or Script()

    return [FakeWorker(name, script=choose) for name in "ab"]


async def test_outputs_come_interleaved_and_each_in_order() -> None:
    script = Script(lengths=(20, 3, 11))
    async with rig(FakeWorker("a", script=lambda submit: script)) as made:
        tokens, last, chunks = await collect(made, several(3))
    assert tokens == {index: expected_tokens(5, script.lengths[index], index) for index in range(3)}
    assert all(chunk.finish is not None for chunk in last.values())
    assert [chunk.index for chunk in chunks[:6]] == [0, 1, 2, 0, 1, 2]
    (submit,) = all_submits(made)
    assert (submit.sampling.n, submit.priority) == (3, -3)
    assert made.workers[0].cancelled == []


@pytest.mark.parametrize("after", [0, 1, 5, 10])
async def test_a_lost_worker_costs_no_output_a_token_and_ended_ones_are_not_asked_for_again(after: int):
    lengths = (20, 4, 11)
    async with rig(
        *first_then_well(Script(die_after=after, lengths=lengths), Script(lengths=lengths))
    ) as made:
        tokens, _, _ = await collect(made, several(3))
    assert tokens == {index: expected_tokens(5, lengths[index], index) for index in range(3)}
    _, replay = sorted(all_submits(made), key=lambda submit: len(submit.continuations))
    assert len(unpack_tokens(replay.token_ids)) == replay.prompt_tokens == PROMPT_TOKENS
    expected = {
        index: expected_tokens(5, after, index) for index, length in enumerate(lengths) if 0 < after < length
    }
    assert {c.index: list(unpack_tokens(c.token_ids)) for c in replay.continuations} == expected


async def test_an_output_that_the_caller_ends_is_cancelled_alone_and_not_asked_for_again() -> None:
    async with rig(FakeWorker("a")) as made:
        tokens, _, _ = await collect(made, several(3), stop_at={1: 5})
        (worker,) = made.workers
        assert (worker.cancelled_outputs, worker.cancelled) == ([(1, 1)], [])
        lengths = {0: 20, 1: 5, 2: 20}
        assert tokens == {index: expected_tokens(5, length, index) for index, length in lengths.items()}
        await collect(made, several(2, max_tokens=400), stop_at={0: 3, 1: 5})
        assert (worker.cancelled_outputs[1:], worker.cancelled) == ([(2, 0)], [2]), "all have ended"
    async with rig(*first_then_well(Script(die_after=8))) as made:
        await collect(made, several(2), stop_at={0: 3})
        replay = max(all_submits(made), key=lambda submit: len(submit.continuations))
    assert [c.index for c in replay.continuations] == [1]


async def test_beams_begin_anew_and_show_nothing_before_their_end() -> None:
    async with rig(*first_then_well(Script(die_after=0))) as made:
        tokens, last, chunks = await collect(made, several(2, beam_width=4))
    assert tokens == {0: expected_tokens(5, 20), 1: expected_tokens(5, 20, 1)}
    assert len(chunks) == 2
    assert [last[index].finish.beam_score for index in range(2)] == [0.0, -1.0]
    for submit in all_submits(made):
        assert not submit.continuations
        assert len(unpack_tokens(submit.token_ids)) == PROMPT_TOKENS


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("script", [Script(repeat_tokens=3), Script(repeat_tokens=2, tokens_a_step=5)])
async def test_logprobs_stay_with_their_tokens_over_repeated_rows_and_a_loss(n: int, script: Script) -> None:
    async with rig(*first_then_well(replace(script, die_after=7), script)) as made:
        _, _, chunks = await collect(made, several(n, logprobs=1))
    for chunk in chunks:
        assert [logprob.token_id for logprob in chunk.logprobs] == chunk.token_ids


async def test_a_worker_that_leaves_out_logprobs_is_not_believed() -> None:
    async with rig(*first_then_well(Script(omit_logprobs=True))) as made:
        _, _, chunks = await collect(made, several(1, logprobs=0))
        assert len(all_submits(made)) == 2
    assert all(len(chunk.logprobs) == len(chunk.token_ids) for chunk in chunks)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("after", [0, 4])
async def test_a_prompts_logprobs_come_once_and_are_not_asked_for_again(n: int, after: int) -> None:
    async with rig(*first_then_well(Script(die_after=after))) as made:
        _, _, chunks = await collect(made, several(n, prompt_logprobs=2))
    reported = [chunk for chunk in chunks if chunk.prompt_logprobs]
    assert reported == chunks[:1]
    assert chunks[0].index == 0
    assert len(chunks[0].prompt_logprobs) == PROMPT_TOKENS - 1
    asked = [submit.sampling.HasField("prompt_logprobs") for submit in all_submits(made)]
    assert sorted(asked) == ([True, True] if after == 0 else [False, True])


async def test_a_grammar_that_cannot_be_compiled_is_the_clients_mistake_in_the_workers_words() -> None:
    unsaid = "cannot be compiled, or not within the server's limits"
    for detail, told in (("not supported: if", "not supported: if"), ("", unsaid)):
        script = Script(reject=session_pb2.REJECT_REASON_GRAMMAR, reject_detail=detail)
        async with rig(FakeWorker("a", script=lambda submit, script=script: script)) as made:
            with pytest.raises(InvalidRequest) as refused:
                await collect(made, several(1))
            (violation,) = refused.value.violations
            assert (violation.field, violation.description) == ("sampling.structured_output", told)
            assert len(all_submits(made)) == 1


@given(data=st.data())
def test_whatever_rows_are_repeated_no_output_gets_a_token_twice(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 4))
    outputs = Outputs(session_pb2.EngineSampling(n=n))
    known: list[list[int]] = [[] for _ in range(n)]
    for index, back, length in data.draw(
        st.lists(st.tuples(st.integers(0, n - 1), st.integers(-2, 5), st.integers(0, 5)), max_size=30)
    ):
        offset = max(len(known[index]) - back, 0)
        told = row(index, offset=offset, token_ids=range(offset, offset + length))
        assert outputs.follows(told) == (offset <= len(known[index]))
        if outputs.follows(told) and (chunk := outputs.take(told)) is not None:
            assert chunk.offset == len(known[index])
            known[index] += chunk.token_ids
    assert known == [list(range(len(tokens))) for tokens in known]
    assert outputs.num_tokens == sum(map(len, known))


async def test_outputs_begin_anew_where_one_has_no_token_yet_and_ended_ones_are_cancelled() -> None:
    lengths = (1, 9, 9)
    dying = Script(lengths=lengths, silent_output=2, die_after=3)
    async with rig(*first_then_well(dying, Script(lengths=lengths))) as made:
        tokens, _, _ = await collect(made, several(3))
        assert [output for worker in made.workers for _, output in worker.cancelled_outputs] == [0]
    assert tokens == {index: expected_tokens(5, lengths[index], index) for index in range(3)}
    assert [len(submit.continuations) for submit in all_submits(made)] == [0, 0]


def row(index: int, *, is_last: bool = False, offset: int = 0, token_ids: Sequence[int] = (1, 2)) -> Tokens:
    return Tokens(
        index=index,
        offset=offset,
        token_ids=[*token_ids],
        finish_reason=int(is_last),
        stop_token=None,
        cached_tokens=0,
    )


def test_rows_of_an_ended_output_are_nothing_and_beams_that_begin_anew_are_asked_for_the_missing_ones():
    outputs = Outputs(session_pb2.EngineSampling(n=2))
    outputs.end(1)
    for index in (1, 2):
        assert outputs.follows(row(index))
        assert outputs.take(row(index)) is None
    outputs = Outputs(session_pb2.EngineSampling(n=3, beam_width=4))
    outputs.take(row(1, is_last=True))
    assert (outputs.continuations(), outputs.resumed()) == ([], b"")
    assert outputs.submitted([]) == {0, 2}, "they end together, so that none of them is cancelled"


@pytest.mark.parametrize("wants_prompt", [True, False])
async def test_a_prompt_that_is_computed_whole_is_placed_as_if_nobody_had_it(wants_prompt: bool) -> None:
    request = several(1, **({"prompt_logprobs": 1} if wants_prompt else {}))
    names = split_names(request.block_names)[1:]
    async with rig(FakeWorker("a")) as made:
        seen: list[Candidate] = []

        def take(_: TokenChunk) -> bool:
            seen[:] = seen or made.fleet.view.candidates(names, PROMPT_TOKENS, {})
            return False

        await made.relay.run(request, Progress(), take)
        (candidate,) = seen
        assert (candidate.cached_tokens == 0) == wants_prompt


def test_a_replay_repeats_the_tokens_of_running_outputs_and_all_but_the_last_of_each_are_computed() -> None:
    single = Outputs(session_pb2.EngineSampling())
    assert (single.num_repeated, single.num_computed) == (0, 0)
    single.take(row(0))
    assert (single.num_repeated, single.num_computed) == (2, 1)
    several = Outputs(session_pb2.EngineSampling(n=3))
    several.take(row(0))
    assert (several.num_repeated, several.num_computed) == (0, 0), "all begin again"
    several.take(row(1))
    several.take(row(2, is_last=True))
    assert (several.num_repeated, several.num_computed) == (4, 2)
