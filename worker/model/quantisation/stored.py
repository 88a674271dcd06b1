"""Tensors of a quantised checkpoint: those of each linear layer, their shapes and types, and their size in memory.

Owns the names of every format, and the refusal of shapes that a format or the layout in memory cannot hold. Pure:
imports no torch and reads no files.

Shapes: O outputs, I inputs of a linear layer. G groups of its inputs.
"""

import math
import re
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from blockyard.worker.model.quantisation.scheme import QuantScheme
from blockyard.worker.unsupported import UnsupportedModelError

Shape = tuple[int, ...]

PLAIN_DTYPES = ("F32", "BF16", "F16")
"""Types of plain numbers and of scales, as safetensors names them."""
_SCALE_BYTES = 4
_ZERO_BYTES = 1
_ORDER_BYTES = 4
_SUPPORTED = re.compile(
    r"model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(experts\.\d+\.|shared_expert\.)?(gate|up|down)_proj)|lm_head"
)
"""Linear layers that may be quantised."""
_EXPERT = re.compile(r"\.experts\.\d+\.")
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linear layers that are one matrix in memory, in this order."""
_LATER = {kind for fused in _FUSED for kind in fused[1:]}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor of a checkpoint, as it may be stored."""

    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...] = PLAIN_DTYPES
    is_optional: bool = False


def stored_tensors(shapes: Mapping[str, Shape], scheme: QuantScheme | None) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint by name. `shapes` are those of the model in full precision.

    Raises UnsupportedModelError as `quantised_modules` does.
    """
    modules = quantised_modules(shapes, scheme)
    stored = {
        name: StoredTensor(shapes=(shape,))
        for name, shape in shapes.items()
        if name.removesuffix(".weight") not in modules or not name.endswith(".weight")
    }
    for module, parts in stored_modules(modules, scheme).items():
        assert scheme is not None
        outputs, inputs = sum(modules[part][0] for part in parts), modules[parts[0]][1]
        for kind, tensor in _parts(scheme, outputs, inputs).items():
            stored.setdefault(f"{module}.{kind}", tensor)
    return stored


def stored_modules(modules: Iterable[str], scheme: QuantScheme | None) -> dict[str, tuple[str, ...]]:
    """Return the modules of a checkpoint, each with the quantised linear layers in it.

    One that holds several layers, the outputs of one behind those of another, has its own name. Others have ours.
    """
    if scheme is None:
        return {}
    together: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        together[scheme.stored_name(module)].append(module)
    return {name if len(parts) > 1 else parts[0]: tuple(parts) for name, parts in together.items()}


def quantised_modules(shapes: Mapping[str, Shape], scheme: QuantScheme | None) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of each quantised linear layer, by its name.

    Raises UnsupportedModelError for one that is never read quantised, whose shape does not fit the scheme, or whose
    neighbour in one matrix or stack of experts is not quantised.
    """
    if scheme is None:
        return {}
    found = {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) == 2 and not name.endswith("embed_tokens.weight")
    }
    modules = {module: shape for module, shape in found.items() if scheme.covers(module)}
    for module, (outputs, inputs) in modules.items():
        if not _SUPPORTED.fullmatch(module):
            raise UnsupportedModelError(
                f"{module} is quantised ({scheme}), which is not supported for this layer"
            )
        _check_shape(scheme, module, outputs, inputs)
        parent, _, kind = module.rpartition(".")
        for fused in _FUSED:
            if kind in fused:
                _check_fused(scheme, parent, fused, modules)
    _check_experts(found, modules)
    return modules


def weights_bytes(
    shapes: Mapping[str, Shape], scheme: QuantScheme | None, item_bytes: int, *, on_cpu: bool
) -> int:
    """Return the bytes of a model's weights in memory, by the layouts of kernels/quantised.py. Plain numbers have
    `item_bytes` each. On a CPU, so have those in FP8."""
    modules = quantised_modules(shapes, scheme)
    plain = sum(
        math.prod(shape)
        for name, shape in shapes.items()
        if name.removesuffix(".weight") not in modules or not name.endswith(".weight")
    )
    total = plain * item_bytes
    for module, (outputs, inputs) in modules.items():
        assert scheme is not None
        if scheme.is_float and on_cpu:
            total += outputs * inputs * item_bytes
            continue
        total += _memory_bytes(scheme, outputs, inputs)
        if scheme.act_order and module.rpartition(".")[2] not in _LATER:
            total += _ORDER_BYTES * inputs
    return total


def _memory_bytes(scheme: QuantScheme, outputs: int, inputs: int) -> int:
    numbers = outputs * inputs * scheme.bits // 8
    if scheme.block_shape is not None:
        return numbers + _SCALE_BYTES * math.prod(_blocks(scheme.block_shape, outputs, inputs))
    groups = outputs * (1 if scheme.group_size is None else inputs // scheme.group_size)
    has_zeros = not scheme.is_float and (scheme.bits == 4 or not scheme.symmetric)
    return numbers + groups * (_SCALE_BYTES + _ZERO_BYTES * has_zeros)


def _parts(scheme: QuantScheme, outputs: int, inputs: int) -> dict[str, StoredTensor]:
    """Return the tensors of one linear layer, by the last part of their names."""
    groups, per_int32 = _groups(scheme, inputs), 32 // scheme.bits
    match scheme.format:
        case "gptq" | "awq":
            packed = (
                (inputs // per_int32, outputs) if scheme.format == "gptq" else (inputs, outputs // per_int32)
            )
            parts = {
                "qweight": StoredTensor(shapes=(packed,), dtypes=("I32",)),
                "qzeros": StoredTensor(shapes=((groups, outputs // per_int32),), dtypes=("I32",)),
                "scales": StoredTensor(shapes=((groups, outputs),)),
            }
            if scheme.format == "gptq":
                parts["g_idx"] = StoredTensor(shapes=((inputs,),), dtypes=("I32",))
                # Some checkpoints store a bias of zeros for layers that have none.
                parts["bias"] = StoredTensor(shapes=((outputs,),), is_optional=True)
            return parts
        case "fp8":
            if scheme.block_shape is not None:
                blocks = _blocks(scheme.block_shape, outputs, inputs)
                scales = {"weight_scale_inv": StoredTensor(shapes=(blocks,))}
            else:
                scales = {"weight_scale": StoredTensor(shapes=((), (1,)))}
            return {"weight": _e4m3(outputs, inputs), **scales, "input_scale": _INPUT_SCALE}
        case "float-quantized":
            return {
                "weight": _e4m3(outputs, inputs),
                "weight_scale": StoredTensor(shapes=_scale_shapes(scheme, outputs, inputs)),
                "input_scale": _INPUT_SCALE,
            }
        case "int-quantized":
            scale_shapes = _scale_shapes(scheme, outputs, inputs)
            return {
                "weight": StoredTensor(shapes=((outputs, inputs),), dtypes=("I8",)),
                "weight_scale": StoredTensor(shapes=scale_shapes),
                "weight_zero_point": StoredTensor(
                    shapes=scale_shapes, dtypes=("I8",), is_optional=scheme.symmetric
                ),
                "input_scale": _INPUT_SCALE,
                "input_zero_point": StoredTensor(shapes=((), (1,)), dtypes=("I8",), is_optional=True),
            }
        case "pack-quantized":
            parts = {
                "weight_packed": StoredTensor(shapes=((outputs, inputs // per_int32),), dtypes=("I32",)),
                "weight_scale": StoredTensor(shapes=_scale_shapes(scheme, outputs, inputs)),
                "weight_shape": StoredTensor(shapes=((2,),), dtypes=("I64", "I32"), is_optional=True),
            }
            if not scheme.symmetric:
                zeros = (outputs // per_int32, groups)
                parts["weight_zero_point"] = StoredTensor(shapes=(zeros,), dtypes=("I32",))
            if scheme.act_order:
                parts["weight_g_idx"] = StoredTensor(shapes=((inputs,),), dtypes=("I32",))
            return parts


_INPUT_SCALE = StoredTensor(shapes=((), (1,)), is_optional=True)


def _e4m3(outputs: int, inputs: int) -> StoredTensor:
    return StoredTensor(shapes=((outputs, inputs),), dtypes=("F8_E4M3",))


def _scale_shapes(scheme: QuantScheme, outputs: int, inputs: int) -> tuple[Shape, ...]:
    if scheme.block_shape is not None:
        return (_blocks(scheme.block_shape, outputs, inputs),)
    if scheme.per_tensor:
        return (1,), ()
    return ((outputs, _groups(scheme, inputs)),)


def _blocks(block_shape: tuple[int, int], outputs: int, inputs: int) -> tuple[int, int]:
    return -(-outputs // block_shape[0]), -(-inputs // block_shape[1])


def _groups(scheme: QuantScheme, inputs: int) -> int:
    return 1 if scheme.group_size is None else inputs // scheme.group_size


def _check_shape(scheme: QuantScheme, module: str, outputs: int, inputs: int) -> None:
    per_int32 = 32 // scheme.bits
    wanted_outputs = wanted_inputs = 1
    if scheme.format in ("gptq", "awq") or (scheme.format == "pack-quantized" and not scheme.symmetric):
        wanted_outputs = per_int32
    if scheme.format in ("gptq", "pack-quantized"):
        wanted_inputs = per_int32
    if scheme.group_size is not None:
        wanted_inputs = math.lcm(wanted_inputs, scheme.group_size)
    if outputs % wanted_outputs or inputs % wanted_inputs:
        raise UnsupportedModelError(
            f"{module} has {outputs} outputs and {inputs} inputs: {scheme} needs multiples of {wanted_outputs} and "
            f"{wanted_inputs}"
        )


def _check_fused(
    scheme: QuantScheme, parent: str, fused: tuple[str, ...], modules: Mapping[str, tuple[int, int]]
) -> None:
    missing = [kind for kind in fused if f"{parent}.{kind}" not in modules]
    if missing:
        raise UnsupportedModelError(
            f"{parent}.{missing[0]} is not quantised, but others of {', '.join(fused)} are, which are one matrix here"
        )
    if scheme.block_shape is not None:
        for kind in fused[:-1]:
            outputs = modules[f"{parent}.{kind}"][0]
            if outputs % scheme.block_shape[0]:
                raise UnsupportedModelError(
                    f"{parent}.{kind} has {outputs} outputs, no whole blocks of {scheme.block_shape[0]}"
                )


def _check_experts(found: Iterable[str], modules: Container[str]) -> None:
    """Check that the same layer of all experts is quantised, or of none."""
    stacks: dict[str, list[str]] = defaultdict(list)
    for module in found:
        stack, is_of_expert = _EXPERT.subn(".experts.", module)
        if is_of_expert:
            stacks[stack].append(module)
    for members in stacks.values():
        plain = [module for module in members if module not in modules]
        if plain and len(plain) < len(members):
            raise UnsupportedModelError(
                f"{plain[0]} is not quantised, but the same layer of other experts is"
            )


def check_division(
    scheme: QuantScheme | None, shapes: Mapping[str, Shape], parts: Mapping[str, Shape], size: int
) -> None:
    """Check that layers can be cut among `size` ranks, by their shapes in the model and in a part of it.

    Raises ValueError for a cut within a group or a block, and for columns in act order.
    """
    if scheme is None or size == 1:
        return
    for module, (outputs, inputs) in quantised_modules(shapes, scheme).items():
        part_outputs, part_inputs = parts[f"{module}.weight"]
        high, wide = scheme.block_shape or (1, scheme.group_size or 2)
        if part_outputs != outputs and (part_outputs % high or outputs % part_outputs):
            raise ValueError(
                f"{module} has {outputs} outputs, which {size} ranks cannot share in whole runs of {high}"
            )
        if part_inputs != inputs and (part_inputs % wide or inputs % part_inputs):
            raise ValueError(
                f"{module} has {inputs} inputs, which {size} ranks cannot share in whole runs of {wide}"
            )
        if part_inputs != inputs and scheme.act_order:
            raise ValueError(f"{module} has its columns in act order, which {size} ranks cannot share")
