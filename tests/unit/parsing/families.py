"""Four families of models, each with a chat template and a tokenizer that has the family's control tokens.

`Conversation` goes the way from an answer's tokens to the message that a client sends back.

The templates are short ones of our own. Each renders answers, reasoning, calls and results as its family's does.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from blockyard.proto.text import TextOutput, load_tokenizer
from blockyard.router.parsing.choice import answer_format
from blockyard.router.parsing.events import Arguments, CallBegun, Said, Thought, merged
from blockyard.router.parsing.formats import PromptEnd
from blockyard.router.parsing.reading import Reading
from blockyard.router.tokenizing.encoder import Encoded, PromptEncoder
from blockyard.router.tokenizing.prompts import ChatMessage, ChatPrompt
from blockyard.router.tokenizing.splices import Answer, place_of
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.unit.router.rig import MODEL

QWEN3 = """\
{%- if tools %}{{- '<|im_start|>system\\nTools: ' ~ (tools | tojson) ~ '<|im_end|>\\n' }}{%- endif %}
{%- set last = namespace(query=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set last.query = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' ~ m.content ~ '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' ~ m.role ~ '\\n' }}
{%- if m.role == 'assistant' and m.reasoning_content and loop.index0 > last.query %}
{{- '<think>\\n' ~ m.reasoning_content.strip('\\n') ~ '\\n</think>\\n\\n' ~ m.content.lstrip('\\n') }}
{%- else %}{{- m.content }}{%- endif %}
{%- for call in m.tool_calls or [] %}
{%- if m.content or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
{{- (call.function.arguments | tojson) ~ '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
HERMES = QWEN3.replace("m.reasoning_content and", "false and")
LLAMA3 = """\
{{- bos_token }}
{%- if tools is defined and tools %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n"parameters": ' ~ (tools | tojson) ~ '<|eot_id|>' }}
{%- endif %}
{%- for m in messages %}
{%- set role = 'ipython' if m.role == 'tool' else m.role %}
{{- '<|start_header_id|>' ~ role ~ '<|end_header_id|>\\n\\n' }}
{%- if m.tool_calls %}{%- set call = m.tool_calls[0].function %}
{{- '{"name": "' ~ call.name ~ '", "parameters": ' ~ (call.arguments | tojson) ~ '}' }}
{%- elif m.role == 'tool' %}{{- m.content | tojson }}{%- else %}{{- m.content | trim }}{%- endif %}
{{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
MISTRAL = """\
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '[INST] ' ~ m.content ~ '[/INST]' }}
{%- elif m.role == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' ~ (m.content | tojson) ~ ', "call_id": "' ~ m.tool_call_id ~ '"}[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}
{{- '{"name": "' ~ call.function.name ~ '", "arguments": ' ~ (call.function.arguments | tojson) }}
{{- ', "id": "' ~ call.id ~ '"}' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
{%- endfor %}
{{- ']' ~ eos_token }}
{%- else %}{{- ' ' ~ m.content | trim ~ eos_token }}{%- endif %}
{%- endfor %}
{%- if tools %}{%- endif %}"""
MISTRAL_NAMED = """\
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '[INST]' ~ m.content ~ '[/INST]' }}
{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS]' ~ m.content ~ '[/TOOL_RESULTS]' }}
{%- else %}{{- m.content }}
{%- for call in m.tool_calls or [] %}
{{- '[TOOL_CALLS]' ~ call.function.name ~ '[ARGS]' ~ (call.function.arguments | tojson) }}
{%- endfor %}
{{- eos_token }}{%- endif %}
{%- endfor %}
{%- if tools %}{%- endif %}"""
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("read_file", "run")
]


@dataclass(frozen=True, kw_only=True)
class Family:
    name: str
    template: str
    eos: str
    special: tuple[str, ...] = ()
    """Special tokens besides those of the demo model."""
    added: tuple[str, ...] = ()
    """Tokens that are not special."""
    has_metaspace: bool = False
    """Whether the tokenizer writes a space as a character of its own, as sentencepiece's do."""

    def tokenizer(self) -> PreTrainedTokenizerBase:
        tokenizer = metaspace_tokenizer() if self.has_metaspace else load_tokenizer(MODEL)
        tokenizer.add_special_tokens({"additional_special_tokens": [*self.special]})
        tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in self.added])
        tokenizer.add_special_tokens({"eos_token": self.eos, "bos_token": "<|begin_of_text|>"})
        tokenizer.chat_template = self.template
        return tokenizer


CALL_TAGS = ("<tool_call>", "</tool_call>")
FAMILIES = [
    Family(name="qwen3", template=QWEN3, eos="<|im_end|>", added=(*CALL_TAGS, "<think>", "</think>")),
    Family(name="hermes", template=HERMES, eos="<|im_end|>", added=CALL_TAGS),
    Family(
        name="llama3",
        template=LLAMA3,
        eos="<|eot_id|>",
        special=("<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
    ),
    Family(
        name="mistral",
        template=MISTRAL,
        eos="</s>",
        special=("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        has_metaspace=True,
    ),
    Family(
        name="mistral-named",
        template=MISTRAL_NAMED,
        eos="</s>",
        special=("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    ),
]


def metaspace_tokenizer() -> PreTrainedTokenizerBase:
    """Return a small tokenizer that works as those of sentencepiece do, learnt from this file."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>"], show_progress=False, max_token_length=12
    )
    tokenizer.train_from_iterator(Path(__file__).read_text().split("\n"), trainer)
    learnt = json.loads(tokenizer.to_str())
    vocabulary = learnt["model"]["vocab"]
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    tokenizer = Tokenizer.from_str(json.dumps(learnt))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def other_tokens(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], chance: random.Random
) -> list[int]:
    """Return other tokens of the same text, as a model may sample them: some are cut in two."""
    vocabulary = tokenizer.get_vocab()
    added = tokenizer.added_tokens_decoder
    sampled: list[int] = []
    for token_id in token_ids:
        token = tokenizer.convert_ids_to_tokens(token_id)
        cuts = [at for at in range(1, len(token)) if {token[:at], token[at:]} <= vocabulary.keys()]
        if token_id in added or not cuts or chance.random() < 0.4:
            sampled.append(token_id)
        else:
            at = chance.choice(cuts)
            sampled += [vocabulary[token[:at]], vocabulary[token[at:]]]
    return sampled


class Conversation:
    """A session with a model of one family, which samples given texts in tokens of its own choice."""

    def __init__(self, family: Family, seed: int) -> None:
        self.tokenizer = family.tokenizer()
        self.encoder = PromptEncoder(self.tokenizer)
        self.format = answer_format(self.tokenizer)
        self._chance = random.Random(seed)
        self._family = family
        self.messages: list[ChatMessage] = []
        self.answers: list[Answer] = []
        self.cached: list[int] = []
        """Tokens of the last prompt and its answer, whose blocks a worker has."""

    def encode(self, answers: Sequence[Answer]) -> Encoded:
        return self.encoder.encode_with(ChatPrompt(self.messages, tools=json.dumps(TOOLS)), answers)

    def answered(self, text: str) -> list[int]:
        """Let the model answer the messages with a text, and add the message that the gateway makes of it. Return the
        answer's tokens."""
        prompt = self.encode(self.answers)
        plain = self.encoder.encode_part(
            text + self._family.eos, is_template=True, after=prompt.token_ids[-1]
        )
        sampled = other_tokens(self.tokenizer, plain, self._chance)
        self.answers.append(Answer(place_of(prompt.text), sampled))
        self.cached = prompt.token_ids + sampled
        self.messages.append(self._parsed(sampled, prompt))
        return sampled

    def said(self, role: str, content: str) -> None:
        """Add a message of a user, or the result of the last call."""
        calls = json.loads(self.messages[-1].tool_calls or "[]") if self.messages else []
        of_tool = {"name": calls[-1]["function"]["name"], "tool_call_id": calls[-1]["id"]} if calls else {}
        self.messages.append(ChatMessage(role, content, **(of_tool if role == "tool" else {})))

    def _parsed(self, sampled: list[int], prompt: Encoded) -> ChatMessage:
        tokenizer = self.tokenizer
        output = TextOutput(tokenizer, stop=(), min_tokens=0, shown=self.format.shown_tokens)
        text = output.push(sampled, is_last=True, stop_token=tokenizer.eos_token_id).text
        reading = Reading(format=self.format, tools={"read_file": None, "run": None}, reads_reasoning=True)
        parser = reading.parser(PromptEnd(tokenizer.decode(prompt.token_ids[-8:])))
        message = ChatMessage("assistant", "")
        calls: list[dict[str, object]] = []
        for event in merged([*parser.push(text), *parser.finish()]):
            match event:
                case Said(said):
                    message = replace(message, content=message.content + said)
                case Thought(thought):
                    message = replace(message, reasoning=thought)
                case CallBegun(name):
                    function = {"name": name, "arguments": ""}
                    calls.append({"id": f"call{len(calls):05}", "type": "function", "function": function})
                case Arguments(arguments):
                    function["arguments"] = arguments
        return replace(message, tool_calls=json.dumps(calls) if calls else "")


def num_common(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    return next(
        (at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
        min(len(ours), len(theirs)),
    )
