"""Tied head: whether a checkpoint that ties head and embedding by its config.json has a head of its own all the same.

The file then decides, as in transformers 5 and vLLM. A head that is a copy of the embedding stays tied and takes no
memory. Reads the headers of the files, and both tensors only where there are both. Does not import torch.
"""

import functools
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from blockyard.worker.model.config import ModelConfig
from blockyard.worker.model.shards import full_name, shard_files

logger = logging.getLogger(__name__)
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header."""
_MOST_HEADER_BYTES = 100_000_000
"""The bound of safetensors' own reader."""
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """A tensor in a file, in the state in which the file was seen."""

    file: Path
    changed_at_ns: int
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Its first byte in the file."""
    num_bytes: int


def has_own_head(folder: Path, config: ModelConfig) -> bool:
    """Return whether the files hold a head that differs from the embedding, and log a warning about it, once.

    Files that are missing or not readable hold none. Loading them raises the error.
    """
    try:
        stored = {
            full_name(name, config): tensor for file in shard_files(folder) for name, tensor in _tensors(file)
        }
        heads = {name for name in stored if name.startswith("lm_head.")}
        if not heads or EMBEDDING not in stored:
            return False
        if heads == {HEAD} and _are_equal(stored[HEAD], stored[EMBEDDING]):
            return False
    except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, OSError, RecursionError):
        return False
    _warn(folder)
    return True


@functools.lru_cache(maxsize=64)
def _warn(folder: Path) -> None:
    logger.warning(
        "%s: config.json ties the head to the embedding, but the files hold another lm_head: it is used. Set "
        "tie_word_embeddings to false there",
        folder,
    )


def _tensors(file: Path) -> Iterator[tuple[str, _Stored]]:
    """Yield each tensor by its name. Raises ValueError and others for a file that is not valid."""
    stat = file.stat()
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if length > _MOST_HEADER_BYTES:
            raise ValueError(f"{file} has a header of {length} bytes")
        header = json.loads(stream.read(length))
    for name, tensor in header.items():
        if name != "__metadata__":
            start, end = tensor["data_offsets"]
            if not 0 <= start <= end <= stat.st_size - _LENGTH_BYTES - length:
                raise ValueError(f"{file} has a tensor outside of the file")
            yield (
                name,
                _Stored(
                    file=file,
                    changed_at_ns=stat.st_mtime_ns,
                    dtype=tensor["dtype"],
                    shape=tuple(tensor["shape"]),
                    start=_LENGTH_BYTES + length + start,
                    num_bytes=end - start,
                ),
            )


@functools.lru_cache(maxsize=64)
def _are_equal(one: _Stored, other: _Stored) -> bool:
    """Compare two tensors byte by byte, up to the first difference. A start asks several times, so it is remembered."""
    if (one.dtype, one.shape, one.num_bytes) != (other.dtype, other.shape, other.num_bytes):
        return False
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.start)
        second.seek(other.start)
        for done in range(0, one.num_bytes, _READ_BYTES):
            size = min(_READ_BYTES, one.num_bytes - done)
            piece = first.read(size)
            if len(piece) != size or piece != second.read(size):
                return False
    return True
