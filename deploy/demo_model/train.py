"""Train the demo model: `python -m blockyard.deploy.demo_model.train --out DIR [--minutes M]`.

Owns the model's shape, the training loop and the export in Hugging Face format. The data comes from corpus.py, chats.py
and tokens.py. With `--steps` alone a run is reproducible on one machine. `--minutes` ends the schedule by that time.
"""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from blockyard.deploy.demo_model.state_file import read_tree, write_tree
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .corpus import read_corpus
from .tokens import (
    CONTEXT_TOKENS,
    IGNORED_LABEL,
    VOCABULARY_TOKENS,
    WindowMaker,
    encode_documents,
    train_tokenizer,
)

ROW_TOKENS = 512
ROWS = 16
CHAT_ROWS = 9
# One step in this many uses rows of the full context, with as many tokens, so that late positions are trained too.
LONG_STEP_INTERVAL = 16
WARMUP_FRACTION = 0.02
PEAK_MATRIX_LEARNING_RATE = 0.02
PEAK_VECTOR_LEARNING_RATE = 3e-3
WEIGHT_DECAY = 0.05
LOG_INTERVAL_STEPS = 20


@dataclass(slots=True, kw_only=True)
class Training:
    """State of a training run, with all that it needs to resume."""

    model: LlamaForCausalLM
    optimizers: tuple[torch.optim.Optimizer, ...]
    windows: WindowMaker
    step: int = 0
    elapsed_seconds: float = 0.0

    def save(self, path: Path) -> None:
        """Write the state to `path` atomically, so that an interrupted write leaves the earlier file."""
        state = {
            "model": dict(self.model.state_dict()),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "rng": self.windows.rng.getstate(),
            "step": self.step,
            "elapsed_seconds": self.elapsed_seconds,
        }
        write_tree(state, path.with_suffix(".partial"))
        path.with_suffix(".partial").replace(path)

    def load(self, path: Path) -> None:
        """Restore the state that `save` wrote."""
        state = read_tree(path)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.windows.rng.setstate(state["rng"])
        self.step, self.elapsed_seconds = state["step"], state["elapsed_seconds"]


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Build a Llama with 3.72 M parameters, so that bf16 weights and the tokenizer are under 8 MB together."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY_TOKENS,
            hidden_size=224,
            intermediate_size=480,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=CONTEXT_TOKENS,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def build_optimizers(model: LlamaForCausalLM) -> tuple[torch.optim.Optimizer, ...]:
    """Build Muon for the layers' matrices and AdamW for the rest. Both together need fewer tokens for the same loss."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    vectors = [p for p in model.model.layers.parameters() if p.ndim < 2]
    rest = [*vectors, *model.model.embed_tokens.parameters(), *model.model.norm.parameters()]
    muon = torch.optim.Muon(matrices, lr=PEAK_MATRIX_LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    adam = torch.optim.AdamW(rest, lr=PEAK_VECTOR_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for optimizer in (muon, adam):
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return muon, adam


def learning_rate_factor(progress: float) -> float:
    """Return the factor of the peak rates: a short linear warm-up, then a cosine to zero. `progress` is from 0 to 1."""
    if progress < WARMUP_FRACTION:
        return (progress + 1e-3) / WARMUP_FRACTION
    return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def loss_of(model: LlamaForCausalLM, ids: Tensor, labels: Tensor) -> Tensor:
    """Return the mean next-token loss in nats over the labels that are not ignored."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits
    return cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=IGNORED_LABEL
    )


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, held_out_ids: Tensor) -> float:
    """Return the mean loss in nats per token on modules that were never trained on, in rows of 512 tokens."""
    rows = held_out_ids[: len(held_out_ids) // ROW_TOKENS * ROW_TOKENS].view(-1, ROW_TOKENS)
    losses = [loss_of(model, chunk, chunk) * len(chunk) for chunk in torch.split(rows, ROWS)]
    return float(torch.stack(losses).sum() / len(rows))


def train_step(training: Training, progress: float) -> float:
    """Train on one batch, with the learning rate for `progress`. Return the loss."""
    rows, chat_rows, row_tokens = ROWS, CHAT_ROWS, ROW_TOKENS
    if training.step % LONG_STEP_INTERVAL == LONG_STEP_INTERVAL - 1:
        rows, chat_rows, row_tokens = ROWS * ROW_TOKENS // CONTEXT_TOKENS, 1, CONTEXT_TOKENS
    ids, labels = training.windows.batch(rows=rows, chat_rows=chat_rows, row_tokens=row_tokens)
    loss = loss_of(training.model, ids, labels)
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
    for optimizer in training.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * learning_rate_factor(progress)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.item()


def export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the checkpoint: bf16 safetensors, configs, and the tokenizer with the chat template in its config."""
    half = copy.deepcopy(model).bfloat16()
    half.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.7,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.bos_token_id],
        pad_token_id=tokenizer.pad_token_id,
    )
    half.save_pretrained(out)
    tokenizer.save_pretrained(out, save_jinja_files=False)


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the checkpoint.")
@click.option("--steps", default=2500, show_default=True, help="Optimiser steps in the whole schedule.")
@click.option("--minutes", default=math.inf, help="End the schedule by then, even with fewer steps.")
@click.option(
    "--state", type=click.Path(path_type=Path), help="Resume from this file and keep it up to date."
)
@click.option("--save-minutes", default=5.0, show_default=True, help="Between two exports.")
@click.option("--threads", default=1, show_default=True, help="CPU threads.")
@click.option("--seed", default=20, show_default=True)
def main(
    out: Path, steps: int, minutes: float, state: Path | None, save_minutes: float, threads: int, seed: int
) -> None:
    """Train the demo model on the standard library and write it to --out."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    corpus = read_corpus()
    tokenizer = train_tokenizer(corpus, seed)
    model = build_model(tokenizer)
    training = Training(
        model=model, optimizers=build_optimizers(model), windows=WindowMaker(corpus, tokenizer, seed)
    )
    if state is not None and state.exists():
        training.load(state)
    held_out_ids = encode_documents(tokenizer, (corpus.held_out,))
    click.echo(f"{model.num_parameters():,} parameters, {training.windows.num_stream_tokens:,} source tokens")

    progress, losses, saved_at = 0.0, [], time.monotonic()
    while progress < 1.0:
        started = time.monotonic()
        progress = max(training.step / steps, training.elapsed_seconds / (60 * minutes))
        losses.append(train_step(training, progress))
        training.step += 1
        training.elapsed_seconds += time.monotonic() - started
        if training.step % LOG_INTERVAL_STEPS == 0:
            mean = sum(losses) / len(losses)
            click.echo(
                f"step {training.step} {progress:.1%} loss {mean:.3f} {training.elapsed_seconds:.0f} s"
            )
            losses.clear()
        if time.monotonic() - saved_at > 60 * save_minutes or progress >= 1.0:
            saved_at = time.monotonic()
            export(model, tokenizer, out)
            click.echo(f"step {training.step} held-out loss {held_out_loss(model, held_out_ids):.3f}")
            if state is not None:
                training.save(state)


if __name__ == "__main__":
    main()
