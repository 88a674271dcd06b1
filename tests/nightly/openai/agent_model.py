"""Checkpoint of a model that plays an agent: it reasons and calls a tool, and with the tool's result it answers.

The next token depends on the last tokens alone. One attention head for each place before looks that far back, and each
neuron of the MLP knows one run of tokens and the token after it.
"""

import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from tests.unit.openai.rig import MODEL

from .ai_sdk_bodies import SAID

TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n' ~ (tools | tojson) ~ '<tool_call><|im_end|>\\n' }}{% endif -%}
{%- for m in messages -%}
{{- '<|im_start|>' ~ m.role ~ '\\n' -}}
{%- if m.reasoning_content %}{{ '<think>\\n' ~ m.reasoning_content ~ '\\n</think>\\n\\n' }}{% endif -%}
{{- m.content or '' -}}
{%- for call in m.tool_calls or [] -%}
{{- ('\\n' if m.content else '') ~ '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' -}}
{{- call.function.arguments | tojson ~ '}\\n</tool_call>' -}}
{%- endfor -%}
{{- ('<|tool_end|>' if m.role == 'tool' else '<|im_end|>') ~ '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif -%}
"""
"""A result of a tool ends with a token of its own, by which the model knows what to say."""
CODE = 64
"""Numbers that stand for a token, each 1 or -1."""
BACK = 14
"""Tokens before the last one that the model sees."""


def write_agent_model(folder: Path, *, context: int = 8192) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|tool_end|>"]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    rules: dict[tuple[int, ...], int] = {}
    for before, text in zip(("<|im_end|>", "<|tool_end|>"), SAID, strict=True):
        prompt = tokenizer.encode(f"{before}\n<|im_start|>assistant\n<think>\n", add_special_tokens=False)
        said = tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False)
        assert len(prompt) <= BACK + 1
        for number, token in enumerate(said):
            window = tuple([*prompt, *said[:number]][-BACK - 1 :])
            assert rules.setdefault(window, token) == token, "two tokens follow the same ones"
    _model(rules, len(tokenizer), end, context).save_pretrained(folder)


def _model(rules: dict[tuple[int, ...], int], num_tokens: int, end: int, context: int) -> Any:
    bias = CODE * (BACK + 1)
    hidden = bias + CODE
    torch.manual_seed(1)
    known = sorted({end, *rules.values(), *(token for window in rules for token in window)})
    other, *codes = torch.randint(0, 2, (len(known) + 1, CODE)).float() * 2 - 1
    code = dict(zip(known, codes, strict=True))
    config = Qwen3Config(
        vocab_size=num_tokens,
        hidden_size=hidden,
        intermediate_size=-(-len(rules) // 32) * 32,
        num_hidden_layers=1,
        num_attention_heads=BACK,
        num_key_value_heads=BACK,
        head_dim=CODE,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end,
        dtype="float32",
    )
    model: Any = Qwen3ForCausalLM(config).to(torch.float32)
    half = CODE // 2
    rates = [1e4 ** (-number / half) for number in range(half)]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.zero_()
        layer = model.model.layers[0]
        attention, mlp = layer.self_attn, layer.mlp
        embedded, head = model.model.embed_tokens.weight, model.lm_head.weight
        embedded[:, :CODE] = other
        embedded[:, bias] = 1.0
        for token in known:
            embedded[token, :CODE] = code[token]
        attention.q_norm.weight.fill_(20.0)
        attention.k_norm.weight.fill_(20.0)
        # It undoes the norm of an embedding, which has CODE + 1 numbers of size 1.
        scale = math.sqrt((CODE + 1) / hidden)
        for number in range(BACK):
            row = number * CODE
            for place, rate in enumerate(rates):
                attention.q_proj.weight[row + place, bias] = math.cos(-(number + 1) * rate)
                attention.q_proj.weight[row + half + place, bias] = math.sin(-(number + 1) * rate)
                attention.k_proj.weight[row + place, bias] = 1.0
            for place in range(CODE):
                attention.v_proj.weight[row + place, place] = scale
                attention.o_proj.weight[row + CODE + place, row + place] = 1.0
        for number, (window, token) in enumerate(rules.items()):
            for back, seen in enumerate(reversed(window)):
                mlp.gate_proj.weight[number, back * CODE : (back + 1) * CODE] = code[seen]
            mlp.gate_proj.weight[number, bias] = CODE / 4 - CODE * len(window)
            mlp.up_proj.weight[number, bias] = 1.0
            mlp.down_proj.weight[:CODE, number] = 1000.0 * code[token]
        for token in known:
            head[token, :CODE] = code[token]
        head[end, bias] = 1000.0
    return model
