"""The scheme of a checkpoint by compressed-tensors, which llm-compressor writes.

Owns what of its config groups is read. Weights alone count: activations are computed in full precision, whatever the
scheme says of them. Imports no torch.
"""

from typing import Any

from blockyard.worker.model.quantisation.scheme import (
    QuantScheme,
    block_shape,
    group_size,
    names,
    refuse_unknown,
    refuse_unless,
)
from blockyard.worker.unsupported import UnsupportedModelError

# The KV cache has the type of --kv-cache-dtype, with scales of its own, so the checkpoint's are skipped (shards.py).
_REMARKS = {"quant_method", "quantization_status", "global_compression_ratio", "version", "kv_cache_scheme"}
_READ = {"config_groups", "format", "ignore", "sparsity_config"}
_GROUP_KEYS = {"targets", "weights", "input_activations", "output_activations", "format"}
# An observer chose the scales, which are stored.
_WEIGHT_REMARKS = {"observer", "observer_kwargs", "scale_dtype", "zp_dtype"}
_WEIGHT_KEYS = {
    "num_bits",
    "type",
    "symmetric",
    "group_size",
    "strategy",
    "block_structure",
    "dynamic",
    "actorder",
}


def read_compressed(given: dict[str, Any]) -> QuantScheme:
    """Return the scheme of a `quantization_config` by compressed-tensors. Raises UnsupportedModelError."""
    refuse_unknown(given, _REMARKS | _READ)
    refuse_unless(given, "quantization_status", ("compressed", "frozen", None))
    refuse_unless(_object(given, "sparsity_config"), "format", ("dense", None))
    group = _only_group(given)
    form = group.get("format") or given.get("format")
    weights = _object(group, "weights")
    refuse_unknown(weights, _WEIGHT_REMARKS | _WEIGHT_KEYS)
    refuse_unless(weights, "dynamic", (False, None))
    refuse_unless(weights, "actorder", (None, False, "weight", "static", "group", "dynamic"))
    ignored, is_symmetric = names(given, "ignore"), weights.get("symmetric", True) is True
    # Under "weight" the columns lie in their own order, and nothing more is stored.
    act_order = weights.get("actorder") in ("group", "dynamic")
    match form, weights.get("type", "int"), weights.get("num_bits"):
        case "pack-quantized", "int", (4 | 8) as bits:
            size = _scale_of(weights, ("group", "channel"))
        case "int-quantized", "int", 8 as bits:
            size = _scale_of(weights, ("group", "channel", "tensor"))
        case "float-quantized", "float", 8 as bits:
            size = _scale_of(weights, ("channel", "tensor", "block"))
        case other:
            raise UnsupportedModelError(
                f"format, type and num_bits of quantization_config are {other}, not pack-quantized int of 4 or 8 bits, "
                "int-quantized int of 8 or float-quantized float of 8"
            )
    return QuantScheme(
        format=form,
        bits=bits,
        group_size=size,
        block_shape=block_shape(weights, "block_structure") if weights.get("strategy") == "block" else None,
        per_tensor=weights.get("strategy") == "tensor",
        symmetric=is_symmetric,
        act_order=act_order,
        head=True,
        ignored=ignored,
    )


def _only_group(given: dict[str, Any]) -> dict[str, Any]:
    groups = given.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        found = sorted(groups) if isinstance(groups, dict) else groups
        raise UnsupportedModelError(f"config_groups={found!r} in quantization_config must be one group")
    (name,) = groups
    group = _object(groups, name)
    refuse_unknown(group, _GROUP_KEYS)
    if group.get("targets") != ["Linear"]:
        raise UnsupportedModelError(
            f"targets={group.get('targets')!r} in quantization_config is not ['Linear']"
        )
    return group


def _object(given: dict[str, Any], key: str) -> dict[str, Any]:
    """Return a value that must be an object, or missing."""
    value = given.get(key)
    if value is not None and not isinstance(value, dict):
        raise UnsupportedModelError(f"{key}={value!r} in quantization_config is no object")
    return value or {}


def _scale_of(weights: dict[str, Any], strategies: tuple[str, ...]) -> int | None:
    """Return the size of a group of columns, or None where a scale belongs to an output, a matrix or a block."""
    refuse_unless(weights, "strategy", strategies)
    if weights["strategy"] != "group":
        return None
    size = group_size(weights)
    if size is None:
        raise UnsupportedModelError("group_size in quantization_config is missing for strategy='group'")
    return size
