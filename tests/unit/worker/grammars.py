"""A tiny tokenizer, sequences with grammars, and outputs drawn from random logits under their masks."""

import json
import random
from collections.abc import Iterable
from pathlib import Path

import torch
from blockyard.worker.grammar.compiled import CompiledGrammar, TokenizerSource
from blockyard.worker.grammar.grammar import Grammar
from blockyard.worker.grammar.masks import Masks
from blockyard.worker.sequences.identifiers import SequenceId
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.sequences.sequence import Sequence, token_array
from blockyard.worker.sequences.step_plan import ScheduledRow
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

DEMO = Path(__file__).parents[3] / "deploy" / "demo_model" / "checkpoint" / "tokenizer.json"
DEMO_TOKENS = 4096
PROMPT = (5, 6, 7)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "grün", "blue"]}, "maxItems": 3},
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
        "address": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/address"}]},
    },
    "required": ["name", "age", "tags", "zip"],
    "additionalProperties": False,
    "$defs": {
        "address": {
            "type": "object",
            "properties": {"street": {"const": "Am Hang"}, "number": {"type": "integer"}},
            "required": ["street"],
            "additionalProperties": False,
        }
    },
}


def demo_source(*, vocab_size: int = DEMO_TOKENS) -> TokenizerSource:
    return TokenizerSource(file=DEMO, vocab_size=vocab_size, eos_token_ids=(0, 2))


def bytes_source(folder: Path) -> TokenizerSource:
    """One token a byte, one end token behind them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    file = folder / "tokenizer.json"
    tokenizer.save(str(file))
    return TokenizerSource(file=file, vocab_size=len(alphabet) + 1, eos_token_ids=(len(alphabet),))


def schema(value: object) -> Grammar:
    return Grammar(kind="json_schema", source=json.dumps(value))


def regex(text: str) -> Grammar:
    return Grammar(kind="regex", source=text)


def row_of(
    grammar: object | None,
    output: Iterable[int] = (),
    *,
    sequence_id: int = 1,
    num_outputs: int = 1,
    client: int = 0,
) -> ScheduledRow:
    """One that samples the token after `output`."""
    tokens = [*PROMPT, *output]
    sequence = Sequence(
        sequence_id=SequenceId(sequence_id),
        tokens=token_array(tokens),
        prompt_length=len(PROMPT),
        sampling=SamplingParams(),
        names=[],
        grammar=grammar,
        num_outputs=num_outputs,
        client=client,
    )
    return ScheduledRow(sequence=sequence, start=len(tokens) - 1, num_tokens=1, samples=True)


def allowed(masks: Masks, rows: list[ScheduledRow], vocab_size: int = DEMO_TOKENS) -> list[set[int]]:
    """Return the allowed tokens of each row: apply the masks to logits of zero in one step."""
    logits_SV = torch.zeros(len(rows), vocab_size)
    masks.start(rows)
    masks.apply(logits_SV, rows)
    return [set(torch.isfinite(logits_V).nonzero().flatten().tolist()) for logits_V in logits_SV]


def draw_output(
    compiled: CompiledGrammar, source: TokenizerSource, seed: int, max_tokens: int = 400
) -> list[int] | None:
    """Tokens before the end token; None if it did not end in time. Ends are likely where they are possible."""
    generator = torch.Generator().manual_seed(seed)
    masks, output = Masks(source.vocab_size), list[int]()
    try:
        for _ in range(max_tokens):
            logits_SV = torch.randn(1, source.vocab_size, generator=generator)
            logits_SV[0, list(source.eos_token_ids)] += 8.0
            row = row_of(compiled, output)
            masks.start([row])
            masks.apply(logits_SV, [row])
            token = int(torch.multinomial(torch.softmax(logits_SV[0], 0), 1, generator=generator))
            if token in source.eos_token_ids:
                return output
            output.append(token)
        return None
    finally:
        masks.close()


def text_of(source: TokenizerSource, output: list[int]) -> str:
    return str(Tokenizer.from_file(str(source.file)).decode(output, skip_special_tokens=False))


def numbers(count: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(10**6), count)
