"""PEFT folders: reads a LoRA adapter from adapter_config.json and adapter_model.safetensors.

Owns what is served and what is refused, by name. An option that changes the result and is not known here is refused, so
that no adapter is computed wrong. Names, shapes and types come from the file's header (stored.py), and are checked
before anything is allocated. A path never leaves the adapter folder of the worker, whatever links lie in it.

Shapes: as in layout.py.
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from blockyard.worker.lora.layout import AdapterWeights, LinearWeights, linear_shapes
from blockyard.worker.lora.stored import DTYPES, StoredTensors, open_regular
from blockyard.worker.model.config import ModelConfig
from blockyard.worker.model.families.table import FAMILIES
from blockyard.worker.sequences.adapter import Adapter

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 18
MAX_ALPHA = 1 << 20
"""Far beyond any adapter's. A larger number may have no place among floats."""
SCHEME = "blockyard-adapter/1"
FINGERPRINT_DIGITS = 32
_NO_MEMORY = ("can't allocate memory", "out of memory")
"""Words of PyTorch where the host has no memory: of its allocators of pageable and of pinned memory."""
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSED = tuple(
    sorted(
        {
            module.rpartition(".")[2]
            for family in FAMILIES.values()
            for module, parts in family.stored.items()
            if len(parts) > 1
        }
    )
)
"""Modules of some families that hold several of these, such as Phi's qkv_proj."""
HARMLESS = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "bias", "init_lora_weights"),
        *(
            "base_model_name_or_path",
            "revision",
            "auto_mapping",
            "task_type",
            "inference_mode",
            "lora_dropout",
        ),
        *("peft_version", "exclude_modules", "megatron_core", "runtime_config", "qalora_group_size"),
        *("eva_config", "corda_config", "loftq_config", "ensure_weight_tying"),
    }
)
"""Options that are read here, or that change nothing once the adapter is trained. Any other one must be off."""
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of `init_lora_weights` that change the weights of the model itself."""
_TENSOR = re.compile(
    r"base_model\.model\.(?:model|model\.language_model|language_model\.model)\.layers\.(?P<index>0|[1-9]\d*)"
    r"\.(?P<module>(?:self_attn|mlp)\.\w+)\.lora_(?P<side>[AB])\.weight"
)
"""The second and third forms are those of models that also read images."""
FileState = tuple[tuple[int, int, int], ...]
"""Size, time of change and number of each file of an adapter."""
Key = tuple[int, str, str]
"""Layer, module such as self_attn.q_proj, and A or B."""


class AdapterMissing(ValueError):
    """There is no such folder, or it has no adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftConfig:
    """Rank, scale and modules, as a folder's config says."""

    rank: int
    scale: float
    modules: frozenset[str] | None
    """The modules that all layers have, such as q_proj. None where the config does not list them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterReader:
    """Reads adapters for one model. It may be used by several threads."""

    folder: Path
    """The worker's adapter folder. Nothing outside it is read."""
    model: ModelConfig
    max_rank: int
    dtype: torch.dtype
    pins: bool = False
    """Whether the weights lie in pinned memory, from which a GPU copies them."""

    def read(self, path: str) -> Adapter:
        """Read the adapter in a folder below the adapter folder.

        Raises AdapterMissing where it is not there, and ValueError with the reason where it cannot be served.
        """
        config_file, weights_file = self._files(path)
        return self._read_weights(weights_file, read_config(config_file, self.max_rank))

    def state(self, path: str) -> FileState:
        """Return what changes when an adapter's files do. Raises as `read` for a path that is not served."""
        statuses = [file.stat() for file in self._files(path)]
        return tuple((status.st_size, status.st_mtime_ns, status.st_ino) for status in statuses)

    def _files(self, path: str) -> tuple[Path, Path]:
        place = self._inside(path)
        return self._file(place / CONFIG_FILE, path), self._file(place / WEIGHTS_FILE, path)

    def _inside(self, path: str) -> Path:
        root = self.folder.resolve()
        try:
            place = (root / path).resolve()
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError("the path is not one of the adapter folder") from error
        if not path or Path(path).is_absolute() or root not in place.parents:
            raise ValueError("the path must lie below the adapter folder, and be relative to it")
        if not place.is_dir():
            raise AdapterMissing(f"the adapter folder has no folder {path!r}")
        return place

    def _file(self, file: Path, path: str) -> Path:
        real = file.resolve()
        if self.folder.resolve() not in real.parents:
            raise ValueError(f"{file.name} of {path!r} is a link out of the adapter folder")
        if not real.is_file():
            raise AdapterMissing(f"the folder {path!r} has no {file.name}")
        return real

    def _read_weights(self, file: Path, config: PeftConfig) -> Adapter:
        with open_regular(file) as opened:
            try:
                stored = StoredTensors(opened, self._max_tensors(config.rank))
            except ValueError as error:
                raise ValueError(f"{WEIGHTS_FILE} is not a readable safetensors file: {error}") from error
            names = self._names(stored, config)
            stored.check_data()
            digest = sha256(f"{SCHEME} {config.rank} {config.scale!r}\n".encode())
            changed = {part for _, module, _ in names for part in _parts(self.model, module)}
            weights = self._allocate(config.rank, changed)
            for key, name in sorted(names.items()):
                tensor = stored.read(name)
                digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
                digest.update(tensor.view(torch.uint8).numpy().data)
                placed = self._place(weights, key, tensor, config.scale)
                if not all(part.isfinite().all() for part in placed):
                    raise ValueError(
                        f"tensor {name!r} is not finite, or its scale takes it out of {self.dtype}"
                    )
        tensors = [tensor for linear in weights.values() for tensor in (linear.a_LPRI, linear.b_LRO)]
        return Adapter(
            fingerprint=digest.hexdigest()[:FINGERPRINT_DIGITS],
            rank=config.rank,
            num_bytes=sum(tensor.nbytes for tensor in tensors),
            weights=weights,
        )

    def _max_tensors(self, rank: int) -> int:
        """Return how many tensors an adapter of the model may have: A and B of each module of each layer."""
        return self.model.num_layers * len(_module_shapes(self.model, rank)) * 2

    def _names(self, stored: StoredTensors, config: PeftConfig) -> dict[Key, str]:
        """Return the file's tensors by what they are, with names, shapes and types checked by the header alone."""
        shapes = _module_shapes(self.model, config.rank)
        names: dict[Key, str] = {}
        owners: dict[Key, str] = {}
        """The tensor of each module, those included that are parts of one."""
        for name, tensor in stored.tensors.items():
            match = _TENSOR.fullmatch(name)
            index = int(match["index"]) if match and len(match["index"]) < 6 else self.model.num_layers
            if match is None or match["module"] not in shapes or index >= self.model.num_layers:
                known = ", ".join(module.rpartition(".")[2] for module in shapes)
                raise ValueError(f"tensor {name!r} is none of this model's {known}")
            wanted = shapes[match["module"]][match["side"]]
            if tensor.shape != wanted:
                raise ValueError(f"tensor {name!r} has shape {tensor.shape}, not {wanted}")
            if tensor.dtype not in DTYPES:
                raise ValueError(f"tensor {name!r} is {tensor.dtype}, not one of {', '.join(DTYPES)}")
            for module in {match["module"], *_parts(self.model, match["module"])}:
                if (other := owners.setdefault((index, module, match["side"]), name)) != name:
                    raise ValueError(f"tensors {other!r} and {name!r} are for the same layer")
            names[index, match["module"], match["side"]] = name
        if not names:
            raise ValueError(f"{WEIGHTS_FILE} has no tensors")
        for index, module, _ in tuple(names):
            if (index, module, "A") not in names or (index, module, "B") not in names:
                raise ValueError(f"layer {index} has one half of {module} alone")
        for listed in sorted(config.modules or ()):
            for index in range(self.model.num_layers):
                if not any((index, f"{block}.{listed}", "A") in names for block in ("self_attn", "mlp")):
                    raise ValueError(f"layer {index} lacks {listed}, which target_modules lists")
        return names

    def _allocate(self, rank: int, modules: set[str]) -> AdapterWeights:
        def zeros(*shape: int) -> torch.Tensor:
            try:
                return torch.zeros(shape, dtype=self.dtype, pin_memory=self.pins)
            except RuntimeError as error:
                # PyTorch has no type for it. Its text has sizes and addresses, so it is not passed on.
                if any(words in str(error) for words in _NO_MEMORY):
                    raise MemoryError("no host memory for the adapter") from error
                raise

        layers = self.model.num_layers
        return {
            name: LinearWeights(
                a_LPRI=zeros(layers, len(shape.parts), rank, shape.num_inputs),
                b_LRO=zeros(layers, rank, sum(shape.widths)),
            )
            for name, shape in linear_shapes(self.model).items()
            if any(module in modules for module, _ in shape.parts)
        }

    def _place(
        self, weights: AdapterWeights, key: Key, tensor: torch.Tensor, scale: float
    ) -> Iterator[torch.Tensor]:
        """Copy a tensor to its places, B transposed and scaled, and yield each. The parts of a fused module have the
        same A, and the rows of B one behind the other."""
        index, module, side = key
        places, row = _places(self.model), 0
        for part in _parts(self.model, module):
            name, number, first, width = places[part]
            if side == "A":
                yield weights[name].a_LPRI[index, number].copy_(tensor)
            else:
                scaled_RO = (tensor[row : row + width].float() * scale).t()
                yield weights[name].b_LRO[index, :, first : first + width].copy_(scaled_RO)
            row += width


def _places(model: ModelConfig) -> dict[str, tuple[str, int, int, int]]:
    """Return where each linear layer is: the fused layer's name, the number among its parts, the first of its outputs
    there, and how many it has."""
    places: dict[str, tuple[str, int, int, int]] = {}
    for name, shape in linear_shapes(model).items():
        first = 0
        for number, (module, width) in enumerate(shape.parts):
            places[module] = name, number, first, width
            first += width
    return places


def _parts(model: ModelConfig, module: str) -> tuple[str, ...]:
    """Return the linear layers that a module of PEFT stands for, in the order of its outputs."""
    return FAMILIES[model.architecture].stored.get(module, (module,))


def _module_shapes(model: ModelConfig, rank: int) -> dict[str, dict[str, tuple[int, int]]]:
    """Return the shapes of A and B of each module, fused ones included."""
    sizes = {
        module: (width, shape.num_inputs)
        for shape in linear_shapes(model).values()
        for module, width in shape.parts
    }
    for module, parts in FAMILIES[model.architecture].stored.items():
        if sizes.keys() >= set(parts):
            sizes[module] = sum(sizes[part][0] for part in parts), sizes[parts[0]][1]
    return {
        module: {"A": (rank, inputs), "B": (outputs, rank)} for module, (outputs, inputs) in sizes.items()
    }


def check_has_slots(model: ModelConfig) -> None:
    """Raise ValueError for a model that serves no adapters."""
    if model.pooling is not None:
        raise ValueError("an embedding model serves no adapters: max_loras must be 0")
    if model.mixture is not None:
        raise ValueError("a mixture of experts serves no adapters: max_loras must be 0")
    if model.rotary_dim < model.head_dim:
        raise ValueError("a model whose heads are rotated in part serves no adapters: max_loras must be 0")


def check_serves_adapters(model: ModelConfig, folder: Path) -> None:
    """Raise ValueError for a model that serves no adapters, or an adapter folder that is not there."""
    check_has_slots(model)
    if not folder.is_dir():
        raise ValueError(f"adapter_dir {str(folder)!r} is no folder on this worker's machine")


def read_config(file: Path, max_rank: int) -> PeftConfig:
    """Return what an adapter's config says. Raises ValueError, naming the option, for what is not served."""
    with open_regular(file) as opened, BufferedReader(opened) as reader:
        data = reader.read(MAX_CONFIG_BYTES + 1)
    if len(data) > MAX_CONFIG_BYTES:
        raise ValueError(f"{CONFIG_FILE} has more than {MAX_CONFIG_BYTES} bytes")
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{CONFIG_FILE} is not valid JSON") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{CONFIG_FILE} must hold a JSON object")
    if raw.get("peft_type") != "LORA":
        raise ValueError(f"peft_type {raw.get('peft_type')!r} is not LORA")
    if raw.get("bias", "none") != "none":
        raise ValueError(f"bias {raw['bias']!r} is not served, only 'none'")
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGES_BASE):
        raise ValueError(f"init_lora_weights {start!r} changes the model's own weights, and is not served")
    for name, value in raw.items():
        if name not in HARMLESS and value:
            raise ValueError(f"the option {name!r} is not served")
    rank, alpha = raw.get("r"), raw.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ValueError(f"r must be a positive whole number, not {rank!r}")
    if rank > max_rank:
        raise ValueError(f"r {rank} is more than the worker's --max-lora-rank {max_rank}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not abs(alpha) <= MAX_ALPHA:
        raise ValueError(f"lora_alpha must be a number of at most {MAX_ALPHA}, not {alpha!r}")
    return PeftConfig(
        rank=rank,
        scale=alpha / math.sqrt(rank) if raw.get("use_rslora") else alpha / rank,
        modules=_listed_modules(raw),
    )


def _listed_modules(raw: dict[str, Any]) -> frozenset[str] | None:
    listed = raw.get("target_modules")
    if not isinstance(listed, list) or raw.get("exclude_modules"):
        return None
    for name in listed:
        # PEFT takes the end of a module's whole name too, such as self_attn.q_proj.
        if not isinstance(name, str) or name.rpartition(".")[2] not in (*MODULES, *FUSED):
            raise ValueError(f"target_modules has {name!r}, which is none of {', '.join((*MODULES, *FUSED))}")
    return None if any("." in name for name in listed) else frozenset(listed)
