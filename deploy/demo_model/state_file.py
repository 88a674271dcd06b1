"""State file: a tree of tensors and plain values as one safetensors file, instead of `torch.save`'s pickle.

Supports dicts, lists, tuples, tensors and JSON values. The tree without its tensors is JSON in the file's metadata.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

_TREE = "tree"


def write_tree(tree: Any, path: Path) -> None:
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_without_tensors(tree, tensors))
    save_file(tensors, path, metadata={_TREE: text})


def read_tree(path: Path) -> Any:
    """Read a tree that `write_tree` wrote. Raise ValueError for a safetensors file without a tree."""
    with safe_open(path, framework="pt") as file:
        text = (file.metadata() or {}).get(_TREE)
        if text is None:
            raise ValueError(f"{path} holds no tree")
        # `safe_open` returns no mapping, so it needs `keys()`.
        return _with_tensors(json.loads(text), {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118


def _without_tensors(node: Any, tensors: dict[str, torch.Tensor]) -> Any:
    match node:
        case torch.Tensor():
            name = str(len(tensors))
            # Copied, because safetensors refuses tensors that share memory, as tied weights do.
            tensors[name] = node.detach().clone().contiguous()
            return {"tensor": name}
        case dict():
            return {"dict": [[key, _without_tensors(value, tensors)] for key, value in node.items()]}
        case list() | tuple():
            return {type(node).__name__: [_without_tensors(value, tensors) for value in node]}
        case _:
            return node


def _with_tensors(node: Any, tensors: dict[str, torch.Tensor]) -> Any:
    match node:
        case {"tensor": name}:
            return tensors[name]
        case {"dict": items}:
            return {key: _with_tensors(value, tensors) for key, value in items}
        case {"list": values}:
            return [_with_tensors(value, tensors) for value in values]
        case {"tuple": values}:
            return tuple(_with_tensors(value, tensors) for value in values)
        case _:
            return node
