"""Weights of a model in memory: where each tensor of a checkpoint goes, loaded from safetensors or drawn.

Owns the names of Hugging Face checkpoints and the fusing of their matrices (q, k, v into one; gate, up into one). The
fused tensors are allocated first, and each tensor of a shard is copied into its part of them. So at most one tensor is
held twice. Does not find the files (shards.py), or know how the weights are used. It lays them out for the backend that
will use them.

Shapes: V vocabulary, H hidden size, N query heads, K kv heads, D head size, I intermediate size. A = N D attention
width, Q = (N + 2 K) D fused query, key and value width. E experts.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from blockyard.kernels.interface import Backend, Stacked
from blockyard.kernels.quantised import LinearWeight
from blockyard.worker.model.config import ModelConfig
from blockyard.worker.model.division import ModelPart, divide
from blockyard.worker.model.quantisation.loading import EXPERT_MATRICES, MATRICES, QuantisedLayers
from blockyard.worker.model.quantisation.stored import quantised_modules
from blockyard.worker.model.rotary_table import rotated_order
from blockyard.worker.model.shards import (
    POST_NORMS,
    PRE_NORMS,
    check_shards,
    full_name,
    is_redundant,
    is_stack,
    names_of_parts,
    shard_files,
    tensor_shapes,
)
from blockyard.worker.model.traits.mixture import Mixture
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
    """Weights of one layer. Not frozen, because `pack` replaces the matrices, which may be quantised."""

    input_norm_H: torch.Tensor | None
    qkv_QH: LinearWeight
    qkv_bias_Q: torch.Tensor | None
    q_norm_D: torch.Tensor | None
    """Norm of a head, or of all heads together. So is `k_norm_D`."""
    k_norm_D: torch.Tensor | None
    attention_out_HA: LinearWeight
    attention_out_bias_H: torch.Tensor | None
    attention_output_norm_H: torch.Tensor | None
    mlp_norm_H: torch.Tensor | None
    gate_up_2IH: LinearWeight | None
    down_HI: LinearWeight | None
    experts: ExpertWeights | None
    """A sparse layer has these in place of the two matrices above."""
    mlp_output_norm_H: torch.Tensor | None


@dataclass(slots=True, kw_only=True)
class Weights:
    """Weights of a model. `lm_head_VH` is the embedding itself where the model ties them, until `pack`."""

    embedding_VH: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm_H: torch.Tensor
    lm_head_VH: LinearWeight

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
    stored = check_shards(folder, config)
    part = part or divide(config)
    modules = quantised_modules(tensor_shapes(part.whole), part.whole.quantisation)
    weights = _allocate(part.config, dtype, device, is_padded=part.size > 1, quantised=modules)
    destinations = _checkpoint_tensors(weights, part.config)
    quantised = _quantised_layers(weights, part, modules, stored, dtype, device)
    for file in shard_files(folder):
        for name, tensor in _read_shard(file, part, quantised):
            if quantised is not None and quantised.takes(name):
                quantised.add(name, tensor)
            elif name in destinations:
                _fill(destinations[name], _as_used(name, tensor, config))
            elif tensor.any():
                raise ValueError(
                    f"{file}: {name!r} is not zero, and a {config.architecture} has no such bias"
                )
    return weights


def _quantised_layers(
    weights: Weights,
    part: ModelPart,
    modules: Mapping[str, tuple[int, int]],
    stored: Collection[str],
    dtype: torch.dtype,
    device: torch.device,
) -> QuantisedLayers | None:
    """Return what puts the quantised matrices into `weights`, or None for a checkpoint without any."""
    if part.whole.quantisation is None:
        return None
    layers = QuantisedLayers(
        part.whole.quantisation,
        modules,
        stored,
        place=part.place,
        order=partial(_order_of_outputs, part.whole),
        dtype=dtype,
        device=device,
    )
    if "lm_head" in modules:
        layers.expect(("lm_head",), partial(setattr, weights, "lm_head_VH"))
    for index, layer in enumerate(weights.layers):
        for field, kinds in MATRICES.items():
            for mlp in ("mlp.", "mlp.shared_expert."):
                names = tuple(f"model.layers.{index}.{kind.replace('mlp.', mlp)}" for kind in kinds)
                if names[0] in modules:
                    layers.expect(names, partial(setattr, layer, field))
        for field, kinds in EXPERT_MATRICES.items() if layer.experts is not None else ():
            name = f"model.layers.{index}.mlp.experts"
            if f"{name}.0.{kinds[0]}" in modules:
                stack = list(getattr(layer.experts, field))
                setattr(layer.experts, field, stack)
                for expert in range(len(stack)):
                    names = tuple(f"{name}.{expert}.{kind}" for kind in kinds)
                    layers.expect(names, partial(stack.__setitem__, expert))
    return layers


def random_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int, part: ModelPart | None = None
) -> Weights:
    """Return weights drawn as an untrained model's, norms at 1. The same for the same seed and kind of device.

    Raises ValueError for a quantised checkpoint: its weights cannot be drawn.

    They are drawn on the device, because an 8B model would take a CPU minutes. Parts of a model are cut from the whole
    tensors, so that together they are the same model.
    """
    if config.quantisation is not None:
        raise ValueError(f"random weights are not quantised, and the checkpoint is ({config.quantisation})")
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


def _as_used(name: str, tensor: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Return a checkpoint's tensor as the decoder uses it."""
    if name.endswith("norm.weight") and config.norm_offset:
        tensor = tensor.float() + config.norm_offset
    order = _order_of_outputs(config, name.rpartition(".")[0], len(tensor))
    return tensor if order is None else tensor[order]


def _order_of_outputs(config: ModelConfig, module: str, outputs: int) -> torch.Tensor | None:
    """Return the order in which the decoder uses the rows of a module, or None where it uses them as they are."""
    # Of Llama's modules these alone have the dimensions of rotated heads as rows.
    is_rotated = module.rpartition(".")[2] in ("q_proj", "k_proj", "q_norm", "k_norm")
    if not is_rotated or (config.rotary_dim == config.head_dim and not config.rotates_adjacent):
        return None
    heads: torch.Tensor = torch.arange(outputs).unflatten(0, (-1, config.head_dim))
    return heads[:, rotated_order(config)].flatten()


def _mlp(config: ModelConfig, layer: int) -> str:
    """Return the name of the MLP that all tokens of a layer take: in a sparse layer, the shared expert."""
    return f"model.layers.{layer}.mlp" + (".shared_expert" if config.is_sparse(layer) else "")


def _allocate(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_padded: bool = False,
    quantised: Collection[str] = (),
) -> Weights:
    """Allocate all tensors. Matrices of the layers named in `quantised` have a shape alone, and are replaced."""

    def empty(*shape: int, layer: str = "") -> torch.Tensor:
        place = "meta" if layer in quantised else device
        return (torch.zeros if is_padded else torch.empty)(shape, dtype=dtype, device=place)

    def norm(width: int, *, exists: bool = True) -> torch.Tensor | None:
        norm_dtype = torch.float32 if config.norms_round_once else dtype
        return torch.empty(width, dtype=norm_dtype, device=device) if exists else None

    def head_norm(width: int, layer: int) -> torch.Tensor | None:
        if not config.weightless_qk_norm:
            return norm(width, exists=config.qk_norm or config.whole_qk_norm)
        rotates = not config.rotated_layers or config.rotated_layers[layer]
        return torch.ones(head_dim, dtype=dtype, device=device) if rotates else None

    def experts(mixture: Mixture, name: str) -> ExpertWeights:
        count, rows = mixture.num_experts, mixture.intermediate_size
        return ExpertWeights(
            gate_EH=empty(-(-count // GATE_PADDED_TO) * GATE_PADDED_TO, hidden).zero_(),
            gate_up_E2IH=empty(count, 2 * rows, hidden, layer=f"{name}.0.gate_proj"),
            down_EHI=empty(count, hidden, rows, layer=f"{name}.0.down_proj"),
        )

    hidden, head_dim = config.hidden_size, config.head_dim
    attention_width = config.num_heads * head_dim
    qkv_width = attention_width + 2 * config.num_kv_heads * head_dim
    q_norm_width = attention_width if config.whole_qk_norm else head_dim
    k_norm_width = config.num_kv_heads * head_dim if config.whole_qk_norm else head_dim
    embedding_VH = empty(config.vocab_size, hidden)
    head_VH = (
        embedding_VH if config.tie_word_embeddings else empty(config.vocab_size, hidden, layer="lm_head")
    )
    shared = None if config.mixture is None else config.mixture.shared_rows or None
    inner = [
        shared if config.is_sparse(index) else config.intermediate_size for index in range(config.num_layers)
    ]
    layers = [
        LayerWeights(
            input_norm_H=norm(hidden, exists=config.pre_norms),
            qkv_QH=empty(qkv_width, hidden, layer=f"{name}.self_attn.q_proj"),
            qkv_bias_Q=empty(qkv_width) if config.attention_bias else None,
            q_norm_D=head_norm(q_norm_width, index),
            k_norm_D=head_norm(k_norm_width, index),
            attention_out_HA=empty(hidden, attention_width, layer=f"{name}.self_attn.o_proj"),
            attention_out_bias_H=empty(hidden) if config.attention_out_bias else None,
            attention_output_norm_H=norm(hidden, exists=config.post_norms),
            mlp_norm_H=norm(hidden, exists=config.pre_norms),
            gate_up_2IH=None
            if rows is None
            else empty(2 * rows, hidden, layer=f"{_mlp(config, index)}.gate_proj"),
            down_HI=None if rows is None else empty(hidden, rows, layer=f"{_mlp(config, index)}.down_proj"),
            experts=experts(config.mixture, f"{name}.mlp.experts")
            if config.mixture and config.is_sparse(index)
            else None,
            mlp_output_norm_H=norm(hidden, exists=config.post_norms),
        )
        for index, name, rows in ((index, f"model.layers.{index}", rows) for index, rows in enumerate(inner))
    ]
    final_norm_H = norm(hidden)
    assert final_norm_H is not None
    return Weights(
        embedding_VH=embedding_VH, layers=tuple(layers), final_norm_H=final_norm_H, lm_head_VH=head_VH
    )


def _checkpoint_tensors(weights: Weights, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Return every tensor that a checkpoint in full precision has, by Llama's name, as a view of where it goes."""
    tensors = {"model.embed_tokens.weight": weights.embedding_VH, "model.norm.weight": weights.final_norm_H}
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = _plain(weights.lm_head_VH)
    for index, layer in enumerate(weights.layers):
        for name, tensor in _layer_tensors(layer, config).items():
            tensors[f"model.layers.{index}.{name}"] = tensor
    return tensors


def _layer_tensors(layer: LayerWeights, config: ModelConfig) -> dict[str, torch.Tensor]:
    qkv_QH = _plain(layer.qkv_QH)
    tensors = {"self_attn.o_proj.weight": _plain(layer.attention_out_HA)}
    norms = (layer.input_norm_H, layer.mlp_norm_H, layer.attention_output_norm_H, layer.mlp_output_norm_H)
    for name, norm_H in zip((*PRE_NORMS, *POST_NORMS), norms, strict=True):
        if norm_H is not None:
            tensors[f"{name}.weight"] = norm_H
    if layer.gate_up_2IH is not None and layer.down_HI is not None:
        mlp = "mlp" if layer.experts is None else "mlp.shared_expert"
        tensors |= _mlp_tensors(mlp, _plain(layer.gate_up_2IH), _plain(layer.down_HI))
    if layer.experts is not None:
        tensors["mlp.gate.weight"] = layer.experts.gate_EH[: len(layer.experts.gate_up_E2IH)]
        stacked = zip(layer.experts.gate_up_E2IH, layer.experts.down_EHI, strict=True)
        for index, (gate_up_2IH, down_HI) in enumerate(stacked):
            tensors |= _mlp_tensors(f"mlp.experts.{index}", _plain(gate_up_2IH), _plain(down_HI))
    if layer.attention_out_bias_H is not None:
        tensors["self_attn.o_proj.bias"] = layer.attention_out_bias_H
    kv_width = config.num_kv_heads * config.head_dim
    widths = [config.num_heads * config.head_dim, kv_width, kv_width]
    for kind, fused in (("weight", qkv_QH), ("bias", layer.qkv_bias_Q)):
        if fused is not None:
            for letter, part in zip("qkv", torch.split(fused, widths), strict=True):
                tensors[f"self_attn.{letter}_proj.{kind}"] = part
    for letter, norm_D in (("q", layer.q_norm_D), ("k", layer.k_norm_D)):
        if norm_D is not None and not config.weightless_qk_norm:
            tensors[f"self_attn.{letter}_norm.weight"] = norm_D
    return tensors


def _mlp_tensors(name: str, gate_up_2IH: torch.Tensor, down_HI: torch.Tensor) -> dict[str, torch.Tensor]:
    gate_IH, up_IH = gate_up_2IH.chunk(2)
    return {
        f"{name}.gate_proj.weight": gate_IH,
        f"{name}.up_proj.weight": up_IH,
        f"{name}.down_proj.weight": down_HI,
    }


def _plain(weight: LinearWeight) -> torch.Tensor:
    """Return a matrix that is allocated. A quantised one has a shape alone by then."""
    assert isinstance(weight, torch.Tensor)
    return weight


def _read_shard(
    file: Path, part: ModelPart, quantised: QuantisedLayers | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that the part needs by Llama's names for them, and of each its slice alone. Quantised layers
    come whole."""
    shapes = tensor_shapes(part.whole)
    try:
        with safe_open(file, framework="pt") as shard:
            for stored in shard.keys():  # noqa: SIM118, the reader is no mapping
                name = full_name(stored, part.whole)
                if quantised is not None and quantised.takes(name):
                    yield name, shard.get_tensor(stored)
                    continue
                names = names_of_parts(name, part.whole)
                if is_redundant(names[0], part.whole):
                    continue
                place = part.place(names[0])
                if is_stack(stored, part.whole):
                    yield from _of_experts(names, shard.get_slice(stored), part)
                elif len(names) > 1:
                    yield from _slices(names, shard.get_slice(stored), part, shapes)
                elif place is not None:
                    yield (
                        names[0],
                        shard.get_tensor(stored) if part.size == 1 else shard.get_slice(stored)[place],
                    )
    except SafetensorError as error:
        raise ValueError(f"{file} is not a readable safetensors file: {error}") from error


def _slices(
    names: tuple[str, ...], stored: Any, part: ModelPart, shapes: dict[str, tuple[int, ...]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the part's slice of each tensor that a stored one holds, one behind the other."""
    first = 0
    for name in names:
        module = name.rpartition(".")[0]
        place, num_rows = part.place(name), shapes[f"{module}.weight"][0]
        if place is not None:
            start, stop, _ = place[0].indices(num_rows)
            yield name, stored[slice(first + start, first + stop), *place[1:]]
        first += num_rows


def _of_experts(names: tuple[str, ...], stored: Any, part: ModelPart) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the part's slice of each expert's matrix from one tensor of all of them, which has inputs as rows."""
    mixture = part.whole.mixture
    assert mixture is not None
    per_expert = len(names) // mixture.num_experts
    for number, name in enumerate(names):
        expert, projection = divmod(number, per_expert)
        outputs = stored.get_shape()[2] // per_expert
        whole_OI = stored[expert, :, projection * outputs : (projection + 1) * outputs].T
        place = part.place(name)
        assert place is not None
        yield name, whole_OI[place]
