"""Shards: finds a checkpoint's files, and checks which tensors they hold, in which shapes.

Owns the check of a checkpoint by the headers of its files, which takes milliseconds. Reads no weights (weights.py) and
does not import torch. Never unpickles: a .bin checkpoint is refused.
"""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from blockyard.proto.naming.model_files import refuse_other_formats
from blockyard.worker.model.config import ModelConfig
from blockyard.worker.model.families.table import FAMILIES
from blockyard.worker.model.quantisation.stored import Shape, StoredTensor, stored_tensors
from blockyard.worker.model.quantisation.stored import weights_bytes as bytes_of_weights
from blockyard.worker.model.traits.mixture import Mixture, common_name

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PRE_NORMS = ("input_layernorm", "post_attention_layernorm")
"""Llama's names for the norms before attention and before the MLP."""
IMAGE_PARTS = ("vision_tower.", "vision_model.", "multi_modal_projector.")
"""Modules of a model that also reads images, which are not loaded."""
_STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_TEXT_PARTS = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
"""Where such a model has its text part: as checkpoints have it, or as transformers 5 names it in memory."""
KV_SCALES = (".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".k_proj.output_scale", ".v_proj.output_scale")
"""Ends of the names of scales for a KV cache in 8 bits, by llm-compressor and AutoFP8. The pool finds its own."""
POST_NORMS = ("attention_output_norm", "mlp_output_norm")
"""Our names for norms that Llama has not: behind attention and behind the MLP."""


def check_shards(folder: Path, config: ModelConfig) -> frozenset[str]:
    """Check names, shapes and data types of all tensors by the headers of the files, and return the names.

    Raises ValueError, naming tensor and file, for one that is missing, unexpected, misshapen or of another type.
    """
    plain, found = tensor_shapes(config), set[str]()
    missing = stored_tensors(plain, config.quantisation)
    # Those of quantised layers have their names in the checkpoint, also where it stores several layers as one.
    quantised = missing.keys() - plain.keys()
    for file in shard_files(folder):
        for stored_name, shape, dtype in _read_header(file):
            name = full_name(stored_name, config)
            if is_redundant(name, config):
                continue
            names = (name,) if name in quantised else names_of_parts(name, config)
            parts = [missing.pop(part, None) for part in names]
            wanted = [part for part in parts if part is not None]
            if len(wanted) < len(parts):
                raise ValueError(f"{file}: tensor {name!r} is unexpected in a {_kind(config)}")
            shapes, dtypes = _stacked(wanted, config) if is_stack(name, config) else _joined(wanted)
            if shape not in shapes:
                raise ValueError(
                    f"{file}: tensor {name!r} has shape {shape}, config.json asks for {shapes[0]}"
                )
            if dtype not in dtypes:
                raise ValueError(f"{file}: tensor {name!r} is {dtype}, not {' or '.join(dtypes)}")
            found.add(name)
    if needed := {_stored_name(name, config) for name, tensor in missing.items() if not tensor.is_optional}:
        raise ValueError(f"{folder}: tensors are missing: {len(needed)}, the first is {min(needed)!r}")
    return frozenset(found)


def _kind(config: ModelConfig) -> str:
    scheme = config.quantisation
    return config.architecture if scheme is None else f"{config.architecture} in {scheme}"


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


def weights_bytes(config: ModelConfig, item_bytes: int, *, on_cpu: bool) -> int:
    """Return the bytes of the weights in memory, if plain numbers have `item_bytes` each. Allocates none."""
    return bytes_of_weights(tensor_shapes(config), config.quantisation, item_bytes, on_cpu=on_cpu)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that a checkpoint must have, by Llama's name for it."""
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
    if mixture.shared_rows:
        shapes |= _mlp_shapes("mlp.shared_expert", hidden, mixture.shared_rows)
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
        "self_attn.o_proj.weight": (hidden, attention_width),
    }
    if config.pre_norms:
        shapes |= {f"{name}.weight": (hidden,) for name in PRE_NORMS}
    if config.post_norms:
        shapes |= {f"{name}.weight": (hidden,) for name in POST_NORMS}
    for letter, width in widths.items():
        shapes[f"self_attn.{letter}_proj.weight"] = (width, hidden)
        if config.attention_bias:
            shapes[f"self_attn.{letter}_proj.bias"] = (width,)
    if config.attention_out_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if config.qk_norm:
        shapes |= {f"self_attn.{letter}_norm.weight": (config.head_dim,) for letter in "qk"}
    if config.whole_qk_norm:
        shapes |= {f"self_attn.{letter}_norm.weight": (widths[letter],) for letter in "qk"}
    return shapes


def names_of_parts(name: str, config: ModelConfig) -> tuple[str, ...]:
    """Return Llama's names of what a stored tensor holds: one, several whose rows follow one another, or the matrices
    of all experts."""
    if config.mixture is not None and is_stack(name, config):
        head, _, stack = name.rpartition(".")
        experts = range(config.mixture.num_experts)
        return tuple(f"{head}.{expert}.{kind}.weight" for expert in experts for kind in _STACKS[stack])
    for module, parts in FAMILIES[config.architecture].stored.items():
        head, found, kind = name.partition(f".{module}.")
        if found:
            return tuple(f"{head}.{part}.{kind}" for part in parts)
    return (name,)


def is_stack(name: str, config: ModelConfig) -> bool:
    """Return whether a stored tensor holds matrices of all experts: [experts, inputs, outputs]."""
    head, _, last = name.rpartition(".")
    return (
        config.mixture is not None
        and config.mixture.is_stacked
        and head.endswith(".experts")
        and last in _STACKS
    )


def _stored_name(name: str, config: ModelConfig) -> str:
    """Return the name in a checkpoint of the tensor that holds what Llama calls `name`."""
    for module, parts in FAMILIES[config.architecture].stored.items():
        for part in parts:
            head, found, kind = name.partition(f".{part}.")
            if found:
                return f"{head}.{module}.{kind}"
    return name


def _joined(parts: Sequence[StoredTensor]) -> tuple[tuple[Shape, ...], tuple[str, ...]]:
    """Return the shapes and types of a stored tensor that holds these, the rows of one behind those of another."""
    first = parts[0]
    if len(parts) == 1:
        return first.shapes, first.dtypes
    num_rows = sum(part.shapes[0][0] for part in parts)
    return ((num_rows, *first.shapes[0][1:]),), first.dtypes


def _stacked(parts: Sequence[StoredTensor], config: ModelConfig) -> tuple[tuple[Shape, ...], tuple[str, ...]]:
    """Return the shape and types of a stored tensor that holds these matrices of all experts."""
    assert config.mixture is not None
    outputs, inputs = parts[0].shapes[0]
    num_experts = config.mixture.num_experts
    return ((num_experts, inputs, len(parts) // num_experts * outputs),), parts[0].dtypes


def is_redundant(name: str, config: ModelConfig) -> bool:
    """Return whether a tensor of a checkpoint is to be skipped.

    These are old rotary frequencies, a tied head, the part that reads images, and scales of a KV cache.
    """
    if config.quantisation is not None and name.endswith(KV_SCALES):
        return True
    if FAMILIES[config.architecture].text_models and name.removeprefix("model.").startswith(IMAGE_PARTS):
        return True
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")


def full_name(name: str, config: ModelConfig) -> str:
    """Return the name of a stored tensor in a model with a head, the same for all architectures. An embedding model may
    be stored without its `model.`."""
    if FAMILIES[config.architecture].text_models:
        stored, usual = next((part for part in _TEXT_PARTS.items() if name.startswith(part[0])), ("", ""))
        name = usual + name.removeprefix(stored)
    name = name if config.mixture is None else common_name(name)
    if config.quantisation is not None and config.quantisation.per_tensor:
        # Transformers' own names, of one scale for a whole matrix too.
        name = name.replace(".weight_scale_inv", ".weight_scale").replace(".activation_scale", ".input_scale")
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
