"""The scheme of a quantised checkpoint, read from `quantization_config` of its config.json.

Owns the refusal of every scheme that is not computed exactly. A key that changes the arithmetic is read here (or in
compressed.py, for its own method), or named in the error. Imports no torch.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from blockyard.worker.unsupported import UnsupportedModelError

FormatName = Literal["pack-quantized", "int-quantized", "float-quantized", "fp8", "awq", "gptq"]

MOST_CALIBRATED = 2**20
"""Upper bound of a group or block in a config.json, beyond any matrix."""

# Keys that say how a checkpoint was made or how another engine should run it, and do not change its numbers.
_REMARKS = {
    "quant_method", "dataset", "damp_percent", "damp_auto_increment", "true_sequential", "static_groups", "meta",
    "model_name_or_path", "model_file_base_name", "model_seqlen", "block_name_to_quantize", "batch_size", "mse",
    "module_name_preceding_first_block", "pad_token_id", "use_cuda_fp16", "use_exllama", "max_input_length",
    "exllama_config", "cache_block_outputs", "tokenizer", "backend", "quantizer", "fuse_max_seq_len", "do_fuse",
    "modules_to_fuse", "offload_to_disk", "act_group_aware", "method",
}  # fmt: skip
_READ = {
    "gptq": {"bits", "group_size", "desc_act", "sym", "checkpoint_format", "lm_head", "is_marlin_format", "pack_dtype",
             "format", "modules_in_block_to_quantize"},
    "awq": {"bits", "group_size", "zero_point", "version", "modules_to_not_convert"},
    "fp8": {"fmt", "activation_scheme", "weight_block_size", "modules_to_not_convert", "ignored_layers",
            "kv_cache_scheme"},
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantScheme:
    """How the linear layers of a checkpoint are quantised: all alike, but for those that are left out."""

    format: FormatName
    bits: Literal[4, 8]
    group_size: int | None = None
    """Columns that share a scale. None: a scale for each output, for the whole matrix, or for a block."""
    block_shape: tuple[int, int] | None = None
    """Outputs and inputs that share a scale (FP8)."""
    per_tensor: bool = False
    """Whether a whole matrix has one scale."""
    symmetric: bool = True
    """Whether all zero points are in the middle. AWQ and GPTQ store them in any case, and they count."""
    act_order: bool = False
    """Whether columns of a group may lie anywhere (GPTQ's desc_act)."""
    zero_offset: Literal[0, 1] = 0
    """The number to add to a stored zero point: GPTQ's first format stores one less."""
    head: bool = False
    """Whether the head is quantised like the other linear layers."""
    ignored: tuple[str, ...] = ()
    """Modules that are left out: names, ends of names, or patterns that begin with `re:`."""
    only: frozenset[str] = frozenset()
    """Names within a layer of the only modules that are quantised. Empty: all are."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Runs of parts of our names of modules, each with what the checkpoint has in its place."""

    def __str__(self) -> str:
        """Return a name such as `gptq-4bit-g128`."""
        fine = (
            f"-g{self.group_size}"
            if self.group_size
            else f"-b{self.block_shape[0]}"
            if self.block_shape
            else ""
        )
        return f"{self.format}-{self.bits}bit{fine}" + ("-order" if self.act_order else "")

    @property
    def is_float(self) -> bool:
        """Return whether numbers are in float8_e4m3fn."""
        return self.format in ("fp8", "float-quantized")

    def covers(self, module: str) -> bool:
        """Return whether a linear layer of the model, given by its name, is quantised. A gate of experts never is."""
        if (module == "lm_head" and not self.head) or module.endswith(".mlp.gate"):
            return False
        name = self.stored_name(module)
        if self.only and module != "lm_head" and name.split(".", 3)[-1] not in self.only:
            return False
        # A model that also reads images has its text part under either of these names.
        spellings = (name, f"language_model.{name}", name.replace("model.", "model.language_model.", 1))
        return not any(is_named(one, self.ignored) for one in spellings)

    def stored_name(self, module: str) -> str:
        """Return the name of a module in the checkpoint. Modules that it stores as one have the same."""
        name = f".{module}."
        for ours, theirs in self.renamed:
            name = name.replace(f".{ours}.", f".{theirs}.")
        return name[1:-1]


def read_scheme(raw: Mapping[str, Any]) -> QuantScheme | None:
    """Return the scheme of a config.json, or None for a checkpoint in full precision. Raises UnsupportedModelError."""
    given = raw.get("quantization_config") or raw.get("compression_config")
    if given is None:
        return None
    if not isinstance(given, dict):
        raise UnsupportedModelError(f"quantization_config={given!r} in config.json is no object")
    match given.get("quant_method"):
        case "gptq":
            return _gptq(given)
        case "awq":
            return _awq(given)
        case "fp8":
            return _fp8(given)
        case "compressed-tensors":
            # Imported here, because that module takes its parts from this one.
            from blockyard.worker.model.quantisation.compressed import read_compressed

            return read_compressed(given)
        case other:
            raise UnsupportedModelError(
                f"quant_method={other!r} in quantization_config is not one of compressed-tensors, fp8, awq, gptq"
            )


def _gptq(given: dict[str, Any]) -> QuantScheme:
    refuse_unknown(given, _REMARKS | _READ["gptq"])
    refuse_unless(given, "bits", (4, 8))
    refuse_unless(given, "pack_dtype", ("int32", None))
    refuse_unless(given, "is_marlin_format", (False, None))
    for key in ("checkpoint_format", "format"):
        refuse_unless(given, key, ("gptq", "gptq_v2", None))
    return QuantScheme(
        format="gptq",
        bits=given["bits"],
        group_size=group_size(given),
        symmetric=flag(given, "sym"),
        act_order=flag(given, "desc_act"),
        zero_offset=0 if "gptq_v2" in (given.get("checkpoint_format"), given.get("format")) else 1,
        head=flag(given, "lm_head"),
        only=_names_in_groups(given, "modules_in_block_to_quantize"),
    )


def _awq(given: dict[str, Any]) -> QuantScheme:
    refuse_unknown(given, _REMARKS | _READ["awq"])
    refuse_unless(given, "bits", (4,))
    refuse_unless(given, "version", ("gemm", "GEMM", None))
    refuse_unless(given, "zero_point", (True,))
    return QuantScheme(
        format="awq",
        bits=4,
        group_size=group_size(given),
        symmetric=False,
        ignored=names(given, "modules_to_not_convert"),
    )


def _fp8(given: dict[str, Any]) -> QuantScheme:
    refuse_unknown(given, _REMARKS | _READ["fp8"])
    refuse_unless(given, "fmt", ("e4m3", None))
    refuse_unless(given, "activation_scheme", ("dynamic", "static", None))
    block = given.get("weight_block_size")
    return QuantScheme(
        format="fp8",
        bits=8,
        block_shape=None if block is None else block_shape(given, "weight_block_size"),
        per_tensor=block is None,
        ignored=names(given, "modules_to_not_convert") + names(given, "ignored_layers"),
    )


def is_named(module: str, patterns: tuple[str, ...]) -> bool:
    """Return whether any pattern of an ignore list names a module, or a folder of it.

    A plain pattern is a run of whole parts: `mlp.gate` does not name `mlp.gate_proj`. After `re:` it is a regular
    expression for the begin of the name.
    """
    plain, expressions = _parted(patterns)
    parts = module.split(".")
    # A model has ten thousand modules of experts, and a list may have a thousand names.
    runs = (".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1))
    return not plain.isdisjoint(runs) or any(expression.match(module) for expression in expressions)


@functools.lru_cache
def _parted(patterns: tuple[str, ...]) -> tuple[frozenset[str], tuple[re.Pattern[str], ...]]:
    """Return the plain patterns of an ignore list, and its regular expressions."""
    expressions = [pattern for pattern in patterns if pattern.startswith("re:")]
    compiled = tuple(re.compile(pattern.removeprefix("re:")) for pattern in expressions)
    return frozenset(patterns).difference(expressions), compiled


def refuse_unknown(given: dict[str, Any], known: set[str]) -> None:
    """Raise UnsupportedModelError for a key that is not known and not empty."""
    for key, value in given.items():
        if key not in known and value not in (None, False, [], {}):
            raise UnsupportedModelError(f"{key}={value!r} in quantization_config is unknown")


def refuse_unless(given: dict[str, Any], key: str, allowed: tuple[object, ...], why: str = "") -> None:
    """Raise UnsupportedModelError for a value that is not allowed. None stands for a missing key."""
    value = given.get(key)
    if not any(value == one and type(value) is type(one) for one in allowed):
        named = " or ".join("missing" if one is None else repr(one) for one in allowed)
        raise UnsupportedModelError(
            f"{key}={value!r} in quantization_config must be {named}{why and f': {why}'}"
        )


def group_size(given: dict[str, Any]) -> int | None:
    """Return the columns of a group. None, stored as -1: all."""
    value = given.get("group_size", -1)
    return None if value in (-1, None) else _positive("group_size", value)


def block_shape(given: dict[str, Any], key: str) -> tuple[int, int]:
    """Return outputs and inputs of a block."""
    value = given.get(key)
    if isinstance(value, str) and re.fullmatch(r"\d+x\d+", value):  # as older versions write it
        value = [int(side) for side in value.split("x")]
    if not isinstance(value, list) or len(value) != 2:
        raise UnsupportedModelError(f"{key}={value!r} in quantization_config must be two numbers")
    return _positive(key, value[0]), _positive(key, value[1])


def flag(given: dict[str, Any], key: str) -> bool:
    """Return a value that must be true or false, or missing."""
    refuse_unless(given, key, (True, False, None))
    return bool(given.get(key))


def names(given: dict[str, Any], key: str) -> tuple[str, ...]:
    """Return a list of names, which may be missing."""
    value = given.get(key) or []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise UnsupportedModelError(f"{key}={value!r} in quantization_config must be a list of names")
    for name in value:
        if name.startswith("re:"):
            try:
                re.compile(name.removeprefix("re:"))
            except re.error as error:
                raise UnsupportedModelError(f"{key} has {name!r}, no regular expression: {error}") from None
    return tuple(value)


def _names_in_groups(given: dict[str, Any], key: str) -> frozenset[str]:
    """Return the names in a list of lists, which may be missing."""
    groups = given.get(key) or []
    if not isinstance(groups, list):
        raise UnsupportedModelError(
            f"{key}={groups!r} in quantization_config must be a list of lists of names"
        )
    return frozenset(name for group in groups for name in names({key: group}, key))


def _positive(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_CALIBRATED:
        raise UnsupportedModelError(f"{key}={value!r} in quantization_config must be a whole number above 0")
    return value
