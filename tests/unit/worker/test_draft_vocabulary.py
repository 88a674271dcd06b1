"""A draft model whose vocabulary is padded otherwise changes no token, and one with other tokens is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from blockyard.worker.llm import LLM
from blockyard.worker.model.config import load_config
from blockyard.worker.startup.draft_vocabulary import check_fits

from .checkpoints import shared_checkpoint
from .drafting import always, drafted_engine, model_of, run_kinds
from .spoiling import Tensors, change_config, change_tensors, copy_of, read_config
from .token_engines import DEMO, outputs_of, prompt_of, submit, tokens_of


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return shared_checkpoint("Qwen2ForCausalLM")


def write_tokens(folder: Path, tokens: dict[str, int], added: dict[str, int] | None = None) -> None:
    extra = [{"content": token, "id": token_id} for token, token_id in (added or {}).items()]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}, "added_tokens": extra}))


def padded(folder: Path, source: Path, vocab_size: int, *, scale: float = 3.0) -> Path:
    """Copy a model with rows added to its vocabulary: others times `scale`. Their logits are often the largest by
    default."""
    added = vocab_size - read_config(source)["vocab_size"]

    def pad(tensors: Tensors) -> None:
        for name in {"model.embed_tokens.weight", "lm_head.weight"} & tensors.keys():
            tensors[name] = torch.cat([tensors[name], scale * tensors[name][:added]])

    change_tensors(copy_of(source, folder), pad)
    return change_config(folder, vocab_size=vocab_size)


@pytest.mark.parametrize("is_larger", [True, False])
def test_a_vocabulary_padded_otherwise_changes_no_output(
    checkpoint: Path, tmp_path: Path, is_larger: bool
) -> None:
    plain = copy_of(checkpoint, tmp_path / "plain")
    # A served model that often draws padding would get few right drafts.
    larger = padded(tmp_path / "larger", checkpoint, 280, scale=3.0 if is_larger else 0.01)
    served, draft_model = (plain, larger) if is_larger else (larger, plain)
    tokens = {f"token {number}": number for number in range(260)}
    write_tokens(served, tokens, {"<end>": 260})
    write_tokens(draft_model, {**tokens, "<end>": 260, "<its own>": 261})
    expected = run_kinds(drafted_engine(served))
    engine = drafted_engine(served, draft_model)
    speculation, _ = always(engine)
    assert run_kinds(engine) == expected
    assert model_of(engine).num_failures == 0
    assert speculation.num_drafted > 40
    # Padding has a share of the served model's draws at a high temperature, and none of the draft model's.
    assert speculation.num_right > (0.9 if is_larger else 0.5) * speculation.num_drafted


def test_a_prompt_of_tokens_that_it_lacks_costs_it_no_failure(checkpoint: Path, tmp_path: Path) -> None:
    draft_model = copy_of(checkpoint, tmp_path / "draft")
    served = padded(tmp_path / "served", checkpoint, 280)
    for folder in (served, draft_model):
        write_tokens(folder, {"a": 0, "b": 1})
    outputs = []
    for engine in (drafted_engine(served), drafted_engine(served, draft_model)):
        if engine.scheduler.speculation is not None:
            always(engine)
        key = submit(engine, (5, 279, 272, *prompt_of(40)), 24), 0
        outputs.append(tokens_of(outputs_of(engine)[key]))
    assert outputs[0] == outputs[1]
    assert model_of(engine).num_failures == 0
    assert engine.load().drafted_tokens > 0


def test_tokens_that_one_model_alone_knows_are_no_difference(checkpoint: Path, tmp_path: Path) -> None:
    config, draft, served = load_config(checkpoint), tmp_path / "draft", tmp_path / "served"
    padded_config = replace(config, vocab_size=280)

    def check() -> None:
        check_fits(padded_config, config, draft, served)

    for folder in (draft, served):
        folder.mkdir()
        write_tokens(folder, {"a": 0, "b": 1})
    check()
    write_tokens(draft, {"a": 0, "b": 1, "c": 2, "beyond": 279})
    check()
    write_tokens(draft, {"a": 0, "c": 1})
    with pytest.raises(ValueError, match="id 1 is 'c' in the one and 'b' in the other"):
        check()
    write_tokens(draft, {"a": 0, "b": 5})
    with pytest.raises(ValueError, match="token 'b' is 5 in the one and 1 in the other"):
        check()
    (draft / "tokenizer.json").write_text(json.dumps({"model": {"vocab": [["a", -1.0], ["b", -2.5]]}}))
    check()
    for broken in ("[]", '{"model": {"vocab": 1}}', '{"model": {"vocab": {"a": "b"}}}', "{"):
        (draft / "tokenizer.json").write_text(broken)
        with pytest.raises(ValueError, match=r"draft.tokenizer\.json cannot be read"):
            check()


def test_another_tokenizer_is_refused_though_it_is_as_large(tmp_path: Path) -> None:
    other = copy_of(DEMO, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second, *_ = vocab
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match=r"other has another tokenizer .*checkpoint.*: token '.*' is \d+ in"):
        LLM(str(DEMO), device="cpu", draft_model=str(other))
    (other / "tokenizer.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        LLM(str(DEMO), device="cpu", draft_model=str(other))
