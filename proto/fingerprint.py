"""What two nodes compare to know that they serve the same model: fingerprints of tokenizer and weights.

Owns which files count and how they are hashed: tagged, length-prefixed fields under sha256. Weights are told
apart by each shard's name, size, header and a spread of samples of its data, because hashing all of it would
read every byte at every start; size and header alone are equal for a base model and its fine-tune. It guards
against mistakes of an operator, not against somebody who forges a checkpoint. Standard library only.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

SCHEME = b"blockyard-fingerprint-1"
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
SAMPLE_BYTES = 4096
SAMPLES_PER_SHARD = 64
_LENGTH_BYTES = 8


def tokenizer_fingerprint(path: str | Path) -> str:
    """sha256 over name and content of the folder's tokenizer and chat template files, in hexadecimal."""
    folder = Path(path)
    files = {file.name: file for pattern in TOKENIZER_PATTERNS for file in folder.glob(pattern)}
    fields: list[bytes] = [b"tokenizer"]
    for name in sorted(files):
        if files[name].is_file():
            fields += [name.encode(), files[name].read_bytes()]
    return _digest(fields)


def model_fingerprint(path: str | Path, *, load_format: str, seed: int, dtype: str) -> str:
    """Equal for workers whose KV blocks and tokens are interchangeable, in hexadecimal.

    The seed counts only where it draws the weights (`load_format` "random"), the shards only where they are
    read. Raises ValueError for a folder without config.json or a shard that is not safetensors.
    """
    folder = Path(path)
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise ValueError(f"{folder} is no model folder: it has no config.json")
    fields = [b"model", config_file.read_bytes(), tokenizer_fingerprint(folder).encode()]
    fields += [dtype.encode(), load_format.encode()]
    if load_format == "random":
        fields.append(str(seed).encode())
    else:
        for shard in sorted(folder.glob("*.safetensors")):
            fields += [shard.name.encode(), _shard_digest(shard)]
    return _digest(fields)


def _shard_digest(shard: Path) -> bytes:
    size = shard.stat().st_size
    with shard.open("rb") as file:
        header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        first_data_byte = _LENGTH_BYTES + header_bytes
        if header_bytes > MAX_HEADER_BYTES or first_data_byte > size:
            raise ValueError(f"{shard} is not a safetensors file: its header would have {header_bytes} bytes")
        fields = [str(size).encode(), file.read(header_bytes)]
        span = max(0, size - first_data_byte - SAMPLE_BYTES)
        for index in range(SAMPLES_PER_SHARD):
            file.seek(first_data_byte + span * index // (SAMPLES_PER_SHARD - 1))
            fields.append(file.read(SAMPLE_BYTES))
    return bytes.fromhex(_digest(fields))


def _digest(fields: Iterable[bytes]) -> str:
    digest = hashlib.sha256(SCHEME)
    for field in fields:
        digest.update(len(field).to_bytes(_LENGTH_BYTES, "little"))
        digest.update(field)
    return digest.hexdigest()
