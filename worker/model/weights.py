"""Weights of a model in memory: where each tensor of a checkpoint goes, loaded from safetensors or drawn.

Owns the names of Hugging Face checkpoints and the fusing of their matrices (q, k, v into one; gate, up into one). The
fused tensors are allocated first, and each tensor of a shard is copied into its part of them. So at most one tensor is
held twice. Does not find the files (shards.py), or know how the weights are used. It lays them out for the backend that
will use them.

Shapes: V vocabulary, H hidden size, N query heads, K kv heads, D head size, I intermediate size. A = N D attention
width, Q = (N + 2 K) D fused query, key and value width. E experts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from blockyard.kernels.interface import Backend, Stacked
from blockyard.worker.model.config import ModelConfig
from blockyard.worker.model.division import ModelPart, divide
from blockyard.worker.model.mixture import Mixture
from blockyard.worker.model.shards import check_shards, full_name, is_redundant, shard_files
from safetensors import SafetensorError, safe_open

RANDOM_STD = 0.02
GATE_PADDED_TO = 16
"""Rows of a gate are a multiple of this: the outputs that a CPU computes at once. The padding chooses nothing."""


@dataclass(slots=True, kw_only=True)
class ExpertWeights:
    """Gate and experts of a sparse layer. I is the intermediate size of one expert."""

    gate_EH: torch.Tensor
    """Padded with zeros to a multiple of `GATE_PADDED_TO` rows."""
    gate_up_E2IH: Stacked
    down_EHI: Stacked


@dataclass(slots=True, kw_only=True)
class LayerWeights:
    """Weights of one layer. Not frozen, because `pack` replaces the matrices."""

    input_norm_H: torch.Tensor
    qkv_QH: torch.Tensor
    qkv_bias_Q: torch.Tensor | None
    q_norm_D: torch.Tensor | None
    k_norm_D: torch.Tensor | None
    attention_out_HA: torch.Tensor
    attention_out_bias_H: torch.Tensor | None
    mlp_norm_H: torch.Tensor
    gate_up_2IH: torch.Tensor | None
    down_HI: torch.Tensor | None
    experts: ExpertWeights | None
    """A sparse layer has these in place of the two matrices above."""


@dataclass(slots=True, kw_only=True)
class Weights:
    """Weights of a model. `lm_head_VH` is the embedding itself where the model ties them, until `pack`."""

    embedding_VH: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm_H: torch.Tensor
    lm_head_VH: torch.Tensor

    def pack(self, backend: Backend) -> None:
        """Replace each matrix of a linear layer by what the backend makes of it, one after the other.

        So at most one is in memory twice: of experts, a projection of one layer. The exception is a tied head that is
        really copied: the embedding stays.
        """
        pack_linear = backend.pack_linear
        for layer in self.layers:
            layer.qkv_QH = pack_linear(layer.qkv_QH)
            layer.attention_out_HA = pack_linear(layer.attention_out_HA)
            if layer.gate_up_2IH is not None and layer.down_HI is not None:
                layer.gate_up_2IH = pack_linear(layer.gate_up_2IH)
                layer.down_HI = pack_linear(layer.down_HI)
            if (experts := layer.experts) is not None:
                experts.gate_EH = backend.pack_gate(experts.gate_EH)
                experts.gate_up_E2IH = backend.pack_experts(experts.gate_up_E2IH)
                experts.down_EHI = backend.pack_experts(experts.down_EHI)
        self.lm_head_VH = pack_linear(self.lm_head_VH)


def load_weights(
    folder: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    part: ModelPart | None = None,
) -> Weights:
    """Load a checkpoint, or a part of it, one shard after the other, converting each tensor on its way.

    Raises ValueError as `check_shards` does.
    """
    check_shards(folder, config)
    part = part or divide(config)
    weights = _allocate(part.config, dtype, device, is_padded=part.size > 1)
    destinations = _checkpoint_tensors(weights, part.config)
    for file in shard_files(folder):
        for name, tensor in _read_shard(file, part):
            _fill(destinations[name], tensor)
    return weights


def random_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int, part: ModelPart | None = None
) -> Weights:
    """Return weights drawn as an untrained model's, norms at 1. The same for the same seed and kind of device.

    They are drawn on the device, because an 8B model would take a CPU minutes. Parts of a model are cut from the whole
    tensors, so that together they are the same model.
    """
    part = part or divide(config)
    weights = _allocate(part.config, dtype, device, is_padded=part.size > 1)
    destinations = _checkpoint_tensors(weights, part.config)
    generator = torch.Generator(device).manual_seed(seed)
    whole = _checkpoint_tensors(_allocate(config, dtype, torch.device("meta")), config)
    for name, shaped in whole.items():
        tensor, place = destinations.get(name), part.place(name)
        if name.endswith("norm.weight"):
            destinations[name].fill_(1.0)
        elif part.size == 1:
            destinations[name].normal_(std=RANDOM_STD, generator=generator)
        else:
            drawn = torch.empty(shaped.shape, dtype=dtype, device=device)
            drawn.normal_(std=RANDOM_STD, generator=generator)
            if tensor is not None and place is not None:
                _fill(tensor, drawn[place])
    return weights


def _fill(destination: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy a tensor to the beginning of its destination. What lies behind it is padding."""
    destination[tuple(map(slice, tensor.shape))].copy_(tensor)


def _allocate(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, *, is_padded: bool = False
) -> Weights:
    def empty(*shape: int) -> torch.Tensor:
        return (torch.zeros if is_padded else torch.empty)(shape, dtype=dtype, device=device)

    def experts(mixture: Mixture) -> ExpertWeights:
        count, rows = mixture.num_experts, mixture.intermediate_size
        return ExpertWeights(
            gate_EH=empty(-(-count // GATE_PADDED_TO) * GATE_PADDED_TO, hidden).zero_(),
            gate_up_E2IH=empty(count, 2 * rows, hidden),
            down_EHI=empty(count, hidden, rows),
        )

    hidden, head_dim = config.hidden_size, config.head_dim
    attention_width = config.num_heads * head_dim
    qkv_width = attention_width + 2 * config.num_kv_heads * head_dim
    embedding_VH = empty(config.vocab_size, hidden)
    inner = [
        None if config.is_sparse(index) else config.intermediate_size for index in range(config.num_layers)
    ]
    layers = [
        LayerWeights(
            input_norm_H=empty(hidden),
            qkv_QH=empty(qkv_width, hidden),
            qkv_bias_Q=empty(qkv_width) if config.attention_bias else None,
            q_norm_D=empty(head_dim) if config.qk_norm else None,
            k_norm_D=empty(head_dim) if config.qk_norm else None,
            attention_out_HA=empty(hidden, attention_width),
            attention_out_bias_H=empty(hidden) if config.attention_out_bias else None,
            mlp_norm_H=empty(hidden),
            gate_up_2IH=None if rows is None else empty(2 * rows, hidden),
            down_HI=None if rows is None else empty(hidden, rows),
            experts=None if config.mixture is None or rows is not None else experts(config.mixture),
        )
        for rows in inner
    ]
    return Weights(
        embedding_VH=embedding_VH,
        layers=tuple(layers),
        final_norm_H=empty(hidden),
        lm_head_VH=embedding_VH if config.tie_word_embeddings else empty(config.vocab_size, hidden),
    )


def _checkpoint_tensors(weights: Weights, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Return every tensor that a checkpoint must have, by its name there, as a view of where it goes."""
    tensors = {"model.embed_tokens.weight": weights.embedding_VH, "model.norm.weight": weights.final_norm_H}
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = weights.lm_head_VH
    for index, layer in enumerate(weights.layers):
        for name, tensor in _layer_tensors(layer, config).items():
            tensors[f"model.layers.{index}.{name}"] = tensor
    return tensors


def _layer_tensors(layer: LayerWeights, config: ModelConfig) -> dict[str, torch.Tensor]:
    tensors = {
        "input_layernorm.weight": layer.input_norm_H,
        "self_attn.o_proj.weight": layer.attention_out_HA,
        "post_attention_layernorm.weight": layer.mlp_norm_H,
    }
    if layer.gate_up_2IH is not None and layer.down_HI is not None:
        tensors |= _mlp_tensors("mlp", layer.gate_up_2IH, layer.down_HI)
    if layer.experts is not None:
        tensors["mlp.gate.weight"] = layer.experts.gate_EH[: len(layer.experts.gate_up_E2IH)]
        stacked = zip(layer.experts.gate_up_E2IH, layer.experts.down_EHI, strict=True)
        for index, (gate_up_2IH, down_HI) in enumerate(stacked):
            tensors |= _mlp_tensors(f"mlp.experts.{index}", gate_up_2IH, down_HI)
    if layer.attention_out_bias_H is not None:
        tensors["self_attn.o_proj.bias"] = layer.attention_out_bias_H
    kv_width = config.num_kv_heads * config.head_dim
    widths = [config.num_heads * config.head_dim, kv_width, kv_width]
    for kind, fused in (("weight", layer.qkv_QH), ("bias", layer.qkv_bias_Q)):
        if fused is not None:
            for letter, part in zip("qkv", torch.split(fused, widths), strict=True):
                tensors[f"self_attn.{letter}_proj.{kind}"] = part
    for letter, norm_D in (("q", layer.q_norm_D), ("k", layer.k_norm_D)):
        if norm_D is not None:
            tensors[f"self_attn.{letter}_norm.weight"] = norm_D
    return tensors


def _mlp_tensors(name: str, gate_up_2IH: torch.Tensor, down_HI: torch.Tensor) -> dict[str, torch.Tensor]:
    gate_IH, up_IH = gate_up_2IH.chunk(2)
    return {
        f"{name}.gate_proj.weight": gate_IH,
        f"{name}.up_proj.weight": up_IH,
        f"{name}.down_proj.weight": down_HI,
    }


def _read_shard(file: Path, part: ModelPart) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that the part needs, and of each its slice alone."""
    try:
        with safe_open(file, framework="pt") as shard:
            for stored in shard.keys():  # noqa: SIM118, the reader is no mapping
                name = full_name(stored, part.whole)
                place = part.place(name)
                if place is None or is_redundant(name, part.whole):
                    continue
                yield name, shard.get_tensor(stored) if part.size == 1 else shard.get_slice(stored)[place]
    except SafetensorError as error:
        raise ValueError(f"{file} is not a readable safetensors file: {error}") from error
