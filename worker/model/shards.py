"""Shards: finds a checkpoint's files, and checks which tensors they hold, in which shapes.

Owns the check of a checkpoint by the headers of its files, which takes milliseconds. Reads no weights (weights.py) and
does not import torch. Never unpickles: a .bin checkpoint is refused.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path

from blockyard.proto.naming.model_files import refuse_other_formats
from blockyard.worker.model.config import ModelConfig
from blockyard.worker.model.mixture import Mixture, common_name

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
READABLE_DTYPES = ("F32", "BF16", "F16")


def check_shards(folder: Path, config: ModelConfig) -> None:
    """Check names, shapes and data types of all tensors by the headers of the files.

    Raises ValueError, naming tensor and file, for one that is missing, unexpected, misshapen or quantised.
    """
    missing = tensor_shapes(config)
    for file in shard_files(folder):
        for stored_name, shape, dtype in _read_header(file):
            name = full_name(stored_name, config)
            if is_redundant(name, config):
                continue
            wanted = missing.pop(name, None)
            if wanted is None:
                raise ValueError(f"{file}: tensor {name!r} is unexpected in a {config.architecture}")
            if shape != wanted:
                raise ValueError(f"{file}: tensor {name!r} has shape {shape}, config.json asks for {wanted}")
            if dtype not in READABLE_DTYPES:
                raise ValueError(f"{file}: tensor {name!r} is {dtype}, quantised weights are not supported")
    if missing:
        raise ValueError(f"{folder}: {len(missing)} tensors are missing, the first is {min(missing)!r}")


def _read_header(file: Path) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yield name, shape and data type of each tensor."""
    # Imported here, because `size` and the commands that call a cluster do without it.
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as shard:
            for name in shard.keys():  # noqa: SIM118, the reader is no mapping
                tensor = shard.get_slice(name)
                yield name, tuple(tensor.get_shape()), str(tensor.get_dtype())
    except SafetensorError as error:
        raise ValueError(f"{file} is not a readable safetensors file: {error}") from error


def num_parameters(config: ModelConfig) -> int:
    """Return the number of parameters, without allocating any."""
    return sum(map(math.prod, tensor_shapes(config).values()))


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that a checkpoint must have, by its name there."""
    vocabulary = (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": vocabulary,
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = vocabulary
    layer, mixture = _layer_shapes(config), config.mixture
    dense = _mlp_shapes("mlp", config.hidden_size, config.intermediate_size)
    sparse = {} if mixture is None else _sparse_shapes(mixture, config.hidden_size)
    for index in range(config.num_layers):
        mlp = sparse if config.is_sparse(index) else dense
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in (layer | mlp).items()}
    return shapes


def _mlp_shapes(name: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    return {f"{name}.{projection}.weight": shape for projection, shape in shapes.items()}


def _sparse_shapes(mixture: Mixture, hidden: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (mixture.num_experts, hidden)}
    for expert in range(mixture.num_experts):
        shapes |= _mlp_shapes(f"mlp.experts.{expert}", hidden, mixture.intermediate_size)
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's tensors, but for those of its MLP."""
    hidden = config.hidden_size
    attention_width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    widths = {"q": attention_width, "k": kv_width, "v": kv_width}
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.o_proj.weight": (hidden, attention_width),
        "post_attention_layernorm.weight": (hidden,),
    }
    for letter, width in widths.items():
        shapes[f"self_attn.{letter}_proj.weight"] = (width, hidden)
        if config.attention_bias:
            shapes[f"self_attn.{letter}_proj.bias"] = (width,)
    if config.attention_out_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if config.qk_norm:
        shapes |= {f"self_attn.{letter}_norm.weight": (config.head_dim,) for letter in "qk"}
    return shapes


def is_redundant(name: str, config: ModelConfig) -> bool:
    """Return whether a tensor of a checkpoint is to be skipped: old rotary frequencies, or a tied head."""
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")


def full_name(name: str, config: ModelConfig) -> str:
    """Return the name of a stored tensor in a model with a head, the same for all architectures. An embedding model may
    be stored without its `model.`."""
    name = name if config.mixture is None else common_name(name)
    is_full = config.pooling is None or name.startswith(("model.", "lm_head."))
    return name if is_full else f"model.{name}"


def shard_files(folder: Path) -> list[Path]:
    index_file = folder / INDEX_FILE
    if index_file.exists():
        files = [folder / name for name in _shard_names(index_file)]
        for file in files:
            if file.parent != folder or not file.is_file():
                raise ValueError(f"{index_file} names the shard {file.name!r}, which is not beside it")
        return files
    if (folder / SINGLE_FILE).exists():
        return [folder / SINGLE_FILE]
    refuse_other_formats(folder)
    raise ValueError(f"{folder} holds no {SINGLE_FILE} and no {INDEX_FILE}")


def _shard_names(index_file: Path) -> list[str]:
    try:
        index = json.loads(index_file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise ValueError(f"{index_file} is not valid JSON") from None
    file_of = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(file_of, dict) or not all(isinstance(name, str) for name in file_of.values()):
        raise ValueError(f"{index_file} has no weight_map from tensors to files")
    return sorted(set(file_of.values()))
