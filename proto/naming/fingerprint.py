"""Fingerprints of tokenizer and weights, by which two nodes know that they serve the same model.

Owns which files count and how they are hashed. Fields are tagged, length-prefixed and hashed with sha256. All bytes of
the weights count, because size and header are equal for a base model and its fine-tune. They are read once and not at
every start (shard_digests.py). Standard library only.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from blockyard.proto.naming.pooling import MODULES_FILE
from blockyard.proto.naming.shard_digests import file_digest, identity

SCHEME = b"blockyard-fingerprint-2"
TOKENIZER_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.jinja",
    "chat_template.json",
)
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
_LENGTH_BYTES = 8


def tokenizer_fingerprint(path: str | Path) -> str:
    """Return the sha256, in hexadecimal, of the names and contents of a folder's tokenizer and chat template files."""
    folder = Path(path)
    files = {file.name: file for pattern in TOKENIZER_PATTERNS for file in folder.glob(pattern)}
    fields: list[bytes] = [b"tokenizer"]
    for name in sorted(files):
        if files[name].is_file():
            fields += [name.encode(), files[name].read_bytes()]
    return _digest(fields)


def model_fingerprint(path: str | Path, *, load_format: str, seed: int, dtype: str) -> str:
    """Return a hexadecimal digest that is equal for workers that serve as one model. Whether they may also exchange KV
    blocks is another question (block_kind.py).

    The seed counts only if it draws the weights (`load_format` "random"), the shards only if they are read. Raises
    ValueError for a folder without config.json, or for a shard that is not safetensors or changes meanwhile.
    """
    folder = Path(path)
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise ValueError(f"{folder} is no model folder: it has no config.json")
    fields = [b"model", config_file.read_bytes(), tokenizer_fingerprint(folder).encode()]
    fields += [dtype.encode(), load_format.encode()]
    if (modules := folder / MODULES_FILE).is_file():
        fields.append(modules.read_bytes())
    if load_format == "random":
        fields.append(str(seed).encode())
    else:
        for shard in sorted(folder.glob("*.safetensors")):
            fields += [shard.name.encode(), _shard_digest(shard)]
    return _digest(fields)


def weights_state(path: str | Path) -> dict[str, list[int]]:
    """Return the identity of each shard's file. The result stays equal as long as no shard is added, removed, replaced
    or written."""
    return {shard.name: identity(shard.stat()) for shard in sorted(Path(path).glob("*.safetensors"))}


def _shard_digest(shard: Path) -> bytes:
    with shard.open("rb") as file:
        header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if header_bytes > min(MAX_HEADER_BYTES, shard.stat().st_size - _LENGTH_BYTES):
            raise ValueError(f"{shard} is not a safetensors file: its header would have {header_bytes} bytes")
    return file_digest(shard)


def _digest(fields: Iterable[bytes]) -> str:
    digest = hashlib.sha256(SCHEME)
    for field in fields:
        digest.update(len(field).to_bytes(_LENGTH_BYTES, "little"))
        digest.update(field)
    return digest.hexdigest()
