"""Quantises checkpoints to each format that the engine reads, by rounding to the nearest: `RECIPES`.

Owns the packing of every format, written from the formats' own descriptions and apart from the reader in
worker/model/quantisation/. Tests read what this writes. Round-to-nearest is the plainest method: published checkpoints
lose less.

Shapes: O outputs, I inputs, G groups of inputs, S inputs of a group. N numbers in 32 bits.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]

FP8_MOST = 448.0
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Columns of eight, in the order in which they lie in 32 bits from the lowest bits on."""
LINEARS = ("_proj", ".w1", ".w2", ".w3")
"""Ends of the names of linear layers beside the head. Those of Mixtral's experts are w1 to w3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantised:
    """One linear layer: its stored tensors by the last part of their names, and the numbers that they stand for."""

    stored: Tensors
    plain_OI: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A way to quantise a checkpoint."""

    config: dict[str, Any]
    """`quantization_config` of config.json."""
    quantise: Callable[[torch.Tensor, str], Quantised]
    """Quantises a weight in float32 [O, I] of the layer with this name."""
    also_head: bool = False


def quantise_checkpoint(source: Path, recipe: Recipe, folder: Path, plain_folder: Path | None = None) -> None:
    """Write a quantised copy of a checkpoint, and with `plain_folder` one in float32 with the same numbers."""
    stored, plain = Tensors(), Tensors()
    for file in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            module, _, kind = name.rpartition(".")
            is_linear = module.endswith(LINEARS) or (module == "lm_head" and recipe.also_head)
            if kind == "weight" and is_linear:
                layer = recipe.quantise(tensor.float(), module)
                stored |= {f"{module}.{part}": value.contiguous() for part, value in layer.stored.items()}
                plain[name] = layer.plain_OI.contiguous()
            else:
                stored[name] = tensor
                plain[name] = tensor.float()
    config = json.loads((source / "config.json").read_text())
    _write(source, folder, stored, config | {"quantization_config": recipe.config})
    if plain_folder is not None:
        _write(source, plain_folder, plain, config | {"dtype": "float32", "torch_dtype": "float32"})


def _write(source: Path, folder: Path, tensors: Tensors, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and file.name != "config.json" and ".safetensors" not in file.name:
            shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def pack_int32(numbers: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack non-negative numbers [A, B] along B to int32 [A, B / N], in this order from the lowest bits on."""
    per = 32 // bits
    numbers_ABN = numbers.to(torch.int64).unflatten(1, (-1, per))
    words = sum(numbers_ABN[:, :, column] << bits * place for place, column in enumerate(order or range(per)))
    assert isinstance(words, torch.Tensor)
    return words.to(torch.uint32).view(torch.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rounded:
    """Numbers without a sign [O, G, S], zero points [O, G] and scales [O, G] in float32."""

    numbers_OGS: torch.Tensor
    zero_OG: torch.Tensor
    scale_OG: torch.Tensor

    @property
    def plain_OI(self) -> torch.Tensor:
        return ((self.numbers_OGS - self.zero_OG[:, :, None]) * self.scale_OG[:, :, None]).flatten(1)


def _rounded(
    weight_OI: torch.Tensor, bits: int, size: int, dtype: torch.dtype, *, symmetric: bool
) -> _Rounded:
    """Round to integers in groups of `size` columns, with scales that `dtype` holds."""
    weight_OGS, most = weight_OI.unflatten(1, (-1, size)), 2**bits - 1
    if symmetric:
        zero_OG = torch.full(weight_OGS.shape[:2], 2.0 ** (bits - 1))
        scale_OG = (weight_OGS.abs().amax(2) / (2 ** (bits - 1) - 1)).to(dtype).float()
    else:
        low, high = weight_OGS.amin(2).clamp(max=0), weight_OGS.amax(2).clamp(min=0)
        scale_OG = ((high - low) / most).to(dtype).float()
        zero_OG = (-low / scale_OG).round().clamp(0, most)
    numbers_OGS = (weight_OGS / scale_OG[:, :, None] + zero_OG[:, :, None]).round().clamp(0, most)
    return _Rounded(numbers_OGS=numbers_OGS, zero_OG=zero_OG, scale_OG=scale_OG)


def _shuffled(
    weight_OI: torch.Tensor, module: str, size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return columns in an order as act order chooses one, that order, and the group of each column in its place.

    Layers with the same inputs get the same order, as GPTQ gives them.
    """
    inputs = weight_OI.shape[1]
    generator = torch.Generator().manual_seed(crc32(module.rpartition(".")[0].encode()))
    order_I = torch.randperm(inputs, generator=generator)
    g_idx_I = torch.empty(inputs, dtype=torch.int32)
    g_idx_I[order_I] = torch.arange(inputs, dtype=torch.int32) // size
    return weight_OI[:, order_I], order_I, g_idx_I


def _restored(columns_OI: torch.Tensor, order_I: torch.Tensor) -> torch.Tensor:
    result_OI = torch.empty_like(columns_OI)
    result_OI[:, order_I] = columns_OI
    return result_OI


def compressed_int(bits: int, size: int, *, symmetric: bool = True, act_order: bool = False) -> Recipe:
    """W4A16 or W8A16 by compressed-tensors: pack-quantized."""

    def quantise(weight_OI: torch.Tensor, module: str) -> Quantised:
        order_I, stored = torch.arange(weight_OI.shape[1]), Tensors()
        if act_order:
            weight_OI, order_I, stored["weight_g_idx"] = _shuffled(weight_OI, module, size)
        rounded = _rounded(weight_OI, bits, size, torch.bfloat16, symmetric=symmetric)
        numbers_OI = _restored(rounded.numbers_OGS.flatten(1), order_I)
        stored["weight_packed"] = pack_int32(numbers_OI, bits)
        stored["weight_scale"] = rounded.scale_OG.bfloat16()
        stored["weight_shape"] = torch.tensor(weight_OI.shape)
        if not symmetric:
            stored["weight_zero_point"] = pack_int32(rounded.zero_OG.t(), bits).t()
        return Quantised(stored=stored, plain_OI=_restored(rounded.plain_OI, order_I))

    weights = {
        "num_bits": bits,
        "type": "int",
        "strategy": "group",
        "group_size": size,
        "symmetric": symmetric,
        "dynamic": False,
        "actorder": "group" if act_order else None,
        "observer": "minmax",
    }
    return Recipe(config=_compressed("pack-quantized", weights, None), quantise=quantise)


def compressed_int8(*, per_tensor: bool = False, also_head: bool = False) -> Recipe:
    """INT8 W8A8 by compressed-tensors: int-quantized, a scale for each output or for the matrix."""

    def quantise(weight_OI: torch.Tensor, _module: str) -> Quantised:
        most = weight_OI.abs().amax() if per_tensor else weight_OI.abs().amax(1, keepdim=True)
        scale = (most / 127).reshape(1 if per_tensor else (-1, 1)).bfloat16()
        numbers_OI = (weight_OI / scale.float()).round().clamp(-128, 127)
        stored = {"weight": numbers_OI.to(torch.int8), "weight_scale": scale}
        return Quantised(stored=stored, plain_OI=numbers_OI * scale.float())

    strategy = "tensor" if per_tensor else "channel"
    weights = {"num_bits": 8, "type": "int", "strategy": strategy, "symmetric": True, "dynamic": False}
    config = _compressed("int-quantized", weights, _dynamic("int"), also_head=also_head)
    return Recipe(config=config, quantise=quantise, also_head=also_head)


def compressed_fp8(*, per_tensor: bool = False) -> Recipe:
    """FP8 W8A8 by compressed-tensors: float-quantized, a scale for each output or for the matrix."""

    def quantise(weight_OI: torch.Tensor, _module: str) -> Quantised:
        most = weight_OI.abs().amax() if per_tensor else weight_OI.abs().amax(1, keepdim=True)
        scale = (most / FP8_MOST).reshape(1 if per_tensor else (-1, 1)).bfloat16()
        numbers_OI = (weight_OI / scale.float()).clamp(-FP8_MOST, FP8_MOST).to(torch.float8_e4m3fn)
        stored = {"weight": numbers_OI, "weight_scale": scale}
        if per_tensor:
            stored["input_scale"] = torch.ones(1)
        return Quantised(stored=stored, plain_OI=numbers_OI.float() * scale.float())

    strategy = "tensor" if per_tensor else "channel"
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    activations = (
        _dynamic("float") if not per_tensor else {**_dynamic("float"), "strategy": "tensor", "dynamic": False}
    )
    return Recipe(config=_compressed("float-quantized", weights, activations), quantise=quantise)


def _dynamic(kind: str) -> dict[str, Any]:
    return {"num_bits": 8, "type": kind, "strategy": "token", "symmetric": True, "dynamic": True}


def _compressed(
    form: str, weights: dict[str, Any], activations: dict[str, Any] | None, *, also_head: bool = False
) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [] if also_head else ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def fp8_blocks(high: int, wide: int) -> Recipe:
    """FP8 in blocks, as Qwen3-FP8 and DeepSeek store it."""

    def quantise(weight_OI: torch.Tensor, _module: str) -> Quantised:
        outputs, inputs = weight_OI.shape
        padded = torch.nn.functional.pad(weight_OI, (0, -inputs % wide, 0, -outputs % high))
        blocks = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, high))
        scale = blocks.abs().amax((1, 3)).clamp(min=1e-12) / FP8_MOST
        numbers = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        plain = (numbers.float() * scale[:, None, :, None]).flatten(2).flatten(0, 1)[:outputs, :inputs]
        numbers_OI = numbers.view(torch.uint8).flatten(2).flatten(0, 1)[:outputs, :inputs].contiguous()
        stored = {"weight": numbers_OI.view(torch.float8_e4m3fn), "weight_scale_inv": scale}
        return Quantised(stored=stored, plain_OI=plain)

    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [high, wide],
        "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.0.input_layernorm"],
    }
    return Recipe(config=config, quantise=quantise)


def awq(size: int) -> Recipe:
    """AWQ in the layout of its GEMM kernel. Without its search for scales, as nothing is calibrated here."""

    def quantise(weight_OI: torch.Tensor, _module: str) -> Quantised:
        rounded = _rounded(weight_OI, 4, size, torch.float16, symmetric=False)
        stored = {
            "qweight": pack_int32(rounded.numbers_OGS.flatten(1).t(), 4, AWQ_ORDER),
            "qzeros": pack_int32(rounded.zero_OG.t(), 4, AWQ_ORDER),
            "scales": rounded.scale_OG.t().half(),
        }
        return Quantised(stored=stored, plain_OI=rounded.plain_OI)

    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }
    return Recipe(config=config, quantise=quantise)


def gptq(
    bits: int, size: int, *, act_order: bool = False, symmetric: bool = True, checkpoint_format: str = "gptq"
) -> Recipe:
    """GPTQ's layout. Its first format stores zero points less one. Rounding is plain here."""

    def quantise(weight_OI: torch.Tensor, module: str) -> Quantised:
        inputs = weight_OI.shape[1]
        order_I, g_idx_I = torch.arange(inputs), torch.arange(inputs, dtype=torch.int32) // size
        if act_order:
            weight_OI, order_I, g_idx_I = _shuffled(weight_OI, module, size)
        rounded = _rounded(weight_OI, bits, size, torch.float16, symmetric=symmetric)
        numbers_OI = _restored(rounded.numbers_OGS.flatten(1), order_I)
        qzeros = pack_int32(rounded.zero_OG.t(), bits)
        if checkpoint_format == "gptq":
            qzeros -= sum(1 << bits * place for place in range(32 // bits))
        stored = {
            "qweight": pack_int32(numbers_OI, bits).t(),
            "qzeros": qzeros,
            "scales": rounded.scale_OG.t().half(),
            "g_idx": g_idx_I,
        }
        if module.endswith("o_proj"):
            stored["bias"] = torch.zeros(len(weight_OI), dtype=torch.float16)
        return Quantised(stored=stored, plain_OI=_restored(rounded.plain_OI, order_I))

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": size,
        "desc_act": act_order,
        "sym": symmetric,
        "checkpoint_format": checkpoint_format,
        "lm_head": False,
        "damp_percent": 0.01,
    }
    return Recipe(config=config, quantise=quantise)


def recipes(size: int = 128, block: int = 128) -> dict[str, Recipe]:
    """Return every recipe by its name, with groups of `size` columns and square blocks of `block`."""
    return {
        "w4a16": compressed_int(4, size),
        "w4a16-asymmetric": compressed_int(4, size, symmetric=False),
        "w4a16-order": compressed_int(4, size, act_order=True),
        "w8a16": compressed_int(8, size),
        "int8": compressed_int8(),
        "int8-tensor-head": compressed_int8(per_tensor=True, also_head=True),
        "fp8": compressed_fp8(),
        "fp8-tensor": compressed_fp8(per_tensor=True),
        "fp8-blocks": fp8_blocks(block, block),
        "awq": awq(size),
        "gptq-4": gptq(4, size),
        "gptq-4-order": gptq(4, size, act_order=True),
        "gptq-4-asymmetric-v2": gptq(4, size, symmetric=False, checkpoint_format="gptq_v2"),
        "gptq-8": gptq(8, size),
        "gptq-8-order-asymmetric": gptq(8, size, act_order=True, symmetric=False),
    }
