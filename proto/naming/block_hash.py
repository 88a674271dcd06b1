"""The name of a block of a prompt: the one rule on which router, worker and index must agree.

`name_i = sha256(name_{i-1} || tokens of block i as little-endian int32)[:16]`. Only full blocks have names. The root
stands for everything besides tokens that decides a block's content, and for which tenants may share it. The hash is
cryptographic, because a collision would serve one tenant's cache to another (CVE-2025-25183 was such a weakness).
"""

import sys
from array import array
from collections.abc import Iterable
from hashlib import sha256

NAME_BYTES = 16
TOKEN_BYTES = 4
SCHEME = "blockyard-block-name/1"


def root_name(
    *,
    cluster_secret: str,
    model_fingerprint: str,
    block_size: int,
    kv_dtype: str,
    adapter: str = "",
    salt: str = "",
    tenant: str = "",
) -> bytes:
    """Return the name before the first block's: 16 bytes. Blocks with a `tenant` are shared within that tenant alone.
    "" is the public pool.

    Fields are tagged and length-prefixed, so that a salt, a tenant and an adapter of the same text never hash alike.
    """
    tagged = {
        "scheme": SCHEME,
        "secret": cluster_secret,
        "model": model_fingerprint,
        "block_size": str(block_size),
        "kv_dtype": kv_dtype,
        "adapter": adapter,
        "salt": salt,
    }
    if tenant:
        # Left out of public names, so that they equal those from before tenants existed.
        tagged["tenant"] = tenant
    digest = sha256()
    for tag, value in tagged.items():
        for text in (tag, value):
            encoded = text.encode()
            digest.update(len(encoded).to_bytes(4, "little") + encoded)
    return digest.digest()[:NAME_BYTES]


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Pack token ids as little-endian int32. Raises OverflowError for one that does not fit."""
    packed = array("i", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """Return the token ids that `pack_tokens` packed. Raises ValueError if the length is no multiple of 4 bytes."""
    tokens = array("i")
    tokens.frombytes(packed)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tolist()


def chain(previous: bytes, token_ids: Iterable[int] | bytes, block_size: int) -> list[bytes]:
    """Return the names of the full blocks of `token_ids` (ids, or packed by pack_tokens) that follow `previous`."""
    packed = token_ids if isinstance(token_ids, bytes) else pack_tokens(token_ids)
    size = block_size * TOKEN_BYTES
    names = []
    for start in range(0, len(packed) - size + 1, size):
        previous = sha256(previous + packed[start : start + size]).digest()[:NAME_BYTES]
        names.append(previous)
    return names


def split_names(packed: bytes) -> list[bytes]:
    """Split one run of bytes into names of 16 bytes. Raises ValueError if the length is no multiple of 16."""
    if len(packed) % NAME_BYTES:
        raise ValueError(f"block names take {NAME_BYTES} bytes each, not {len(packed)} in all")
    return [packed[start : start + NAME_BYTES] for start in range(0, len(packed), NAME_BYTES)]
