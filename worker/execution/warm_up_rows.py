"""Trial rows: steps that serve no request. They warm a runner up, or are the largest that can occur."""

from blockyard.kernels.attention.shared_prefix import MIN_SHARED_TOKENS, MIN_SHARERS
from blockyard.worker.sequences.block_table import BlockTable
from blockyard.worker.sequences.identifiers import BlockId, SequenceId
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.sequences.sequence import Sequence, token_array
from blockyard.worker.sequences.step_plan import ScheduledRow

_PLAIN = SamplingParams()
_FILTERED = SamplingParams(top_p=0.5)
_EVERY_OPTION = SamplingParams(
    top_p=0.5,
    min_p=0.001,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    repetition_penalty=1.1,
    logit_bias=((0, 1.0),),
    logprobs=20,
)
"""Options that make all the copies of the logits that sampling ever makes."""


def warm_up_row(number: int, num_tokens: int, block_size: int) -> ScheduledRow:
    """Return a row of `num_tokens` over blocks from 0 on. No other row's sequence may have this `number` as its id."""
    blocks = [BlockId(block) for block in range(-(-num_tokens // block_size))]
    return _row(number, num_tokens, blocks, _FILTERED)


def sharing_rows(max_context_tokens: int, block_size: int) -> tuple[ScheduledRow, ...]:
    """Return decodes that share a prefix, as far as the context allows, and a chunk of a prompt."""
    shared_tokens = -(-MIN_SHARED_TOKENS // block_size) * block_size
    context = min(shared_tokens + 1, max_context_tokens)
    decodes = [_in_one_block(-1 - number, context, 1, block_size) for number in range(MIN_SHARERS)]
    return *decodes, _in_one_block(-1 - MIN_SHARERS, 2, 2, block_size)


def first_tokens(count: int, block_size: int) -> tuple[ScheduledRow, ...]:
    """Return rows of one token each. All of them write the first block."""
    return tuple(_in_one_block(-1 - number, 1, 1, block_size) for number in range(count))


def prompt_in_one_block(num_tokens: int, block_size: int) -> ScheduledRow:
    """Return a prompt, of which all tokens write the first block."""
    return _in_one_block(-1, num_tokens, num_tokens, block_size)


def chunk_behind(window: int, block_size: int) -> ScheduledRow:
    """Return a chunk of a prompt whose second token does not see the first key."""
    return _in_one_block(-1, window + 1, 2, block_size)


def edited_rows(block_size: int) -> tuple[ScheduledRow, ...]:
    """Return a row with every option, and one that draws without any from the edited logits."""
    return _in_one_block(-1, 1, 1, block_size, _EVERY_OPTION), _in_one_block(-2, 1, 1, block_size)


def _in_one_block(
    number: int, context: int, num_tokens: int, block_size: int, sampling: SamplingParams = _PLAIN
) -> ScheduledRow:
    """Return a row of the last tokens of a context. It reads and writes the first block again and again."""
    row = _row(number, context, [BlockId(0)] * -(-context // block_size), sampling)
    return row._replace(start=context - num_tokens, num_tokens=num_tokens)


def largest_rows(
    num_tokens: int, num_sequences: int, *, block_size: int, max_row_tokens: int
) -> tuple[ScheduledRow, ...]:
    """Return rows with `num_tokens` in all, of about equal length, that sample with every option.

    There are as many rows as there may be sequences, or more where a row would exceed `max_row_tokens`. All of them
    write the same block again and again.
    """
    num_rows = min(num_tokens, max(num_sequences, -(-num_tokens // max_row_tokens)))
    shorter, num_longer = divmod(num_tokens, num_rows)
    lengths = [shorter] * (num_rows - num_longer) + [shorter + 1] * num_longer
    return tuple(
        _row(-1 - number, length, [BlockId(0)] * -(-length // block_size), _EVERY_OPTION)
        for number, length in enumerate(lengths)
    )


def _row(number: int, num_tokens: int, blocks: list[BlockId], sampling: SamplingParams) -> ScheduledRow:
    sequence = Sequence(
        sequence_id=SequenceId(number),
        tokens=token_array([0]) * num_tokens,
        prompt_length=num_tokens,
        sampling=sampling,
        names=[],
        block_table=BlockTable(blocks),
    )
    return ScheduledRow(sequence=sequence, start=0, num_tokens=num_tokens, samples=True)
