"""The layout of the prefix index in Redis (>= 6.2, or Valkey): keys and packing.

Owns the layout and its version. Does not own the scripts that work on it (lua/) or a connection (redis.py).

Keys, all under `blockyard:<cluster>:v<SCHEMA_VERSION>:`, followed by `model-<hex>:` for a further model of the cluster,
and by `shard-<n>:` on all servers but the first of several (shards.py)

| b:<hex3>   | HASH | one bucket of names: field = name[1:8], value = the berths that hold it
| berth:<n>  | HASH | epoch, sequence, lease (ms) and the worker's record
| leases     | ZSET | berth -> end of its lease, in ms of Redis's clock; 0 once retired
| identities | HASH | identity -> its newest berth
| names      | HASH | berth -> identity (what a look-up returns): worker_id NUL incarnation [NUL "anywhere"]
| free       | SET  | berth numbers that may be used again
| condemned  | SET  | berths that the running purge removes
| claim      | HASH | holder, until (ms of Redis's clock): the running `up`, so that only one has this name
| state      | HASH | next (highest number given), beat (last renewal), beat_lease, since (service), cursor (purge),
|            |      | roster (changes with each registration: a reader that knows it need not read `names` again)
| records:*  | STR  | sealed records of routers (router/sealed_records.py); no part of the index
| answers:*  | STR  | answers of sessions, sealed (router/generation/answer_store.py); no part of the index
| adapters:* | STR  | log of a model's adapters, sealed (router/adapters/log.py); no part of the index

Only these last three are strings. Records and answers are only under the cluster's own prefix.

Only the first 8 bytes of a name are kept. Their first 12 bits choose one of 4,096 buckets, which are small enough to
stay listpacks. Bytes 1..7 are the field, so bucket and field hold all 64 bits. A collision costs one wrong hint. A
value is sorted u16, little-endian. Equal sets are equal strings, so a look-up counts each distinct value once.

A look-up bisects. Two facts make that legal:

- The cache of each live worker is prefix-closed. So the live sets along a chain are nested, and equal size means equal
  set.
- Dead berths, which `leases` lists first, are not counted. So holes that dead workers leave cannot be seen.

For the same reason the purge may go bucket by bucket, in no order of the chains: it removes only what no look-up
counts. It needs no journal of what a berth once added. A dead worker costs the same few bytes until the purge passes.

A worker with a host cache has a second berth. Its identity ends in "anywhere". Every rule above treats it as any
other berth: what is anywhere in a worker is prefix-closed too, so the live sets stay nested. It has the epoch of the
first berth and no record. Both leases are written at the same moments, so both lapse, retire and are purged together.
Readers that do not know of second berths take one for an unknown incarnation.
"""

import re
import struct
from collections.abc import Iterable
from hashlib import blake2b

SCHEMA_VERSION = 1
ANYWHERE_SUFFIX = "\0anywhere"
NUM_BUCKETS = 4096
INDEXED_NAME_BYTES = 8
BERTH_BYTES = 2
MAX_BUCKET_ENTRIES = 512
MAX_BUCKET_VALUE_BYTES = 512
"""256 holders of one block. Beyond it the bucket turns into a hash table of three times the size."""

PURGE_SLICE_ENTRIES = 2048
"""A purge slice ends after so many names, however few buckets that was: about 1 ms of Redis."""

MAX_BISECTED_BLOCKS = 96
"""Most blocks that one look-up reads between those of its gallop. With more ends of berths than that in one chain,
depths inside the narrowest gaps are rounded down."""
MAX_BISECTED_BYTES = 24 << 10
"""Most bytes of the values that those reads find, for a chain that thousands hold."""

INFO_SLICE_BUCKETS = 256
INFO_SAMPLE_EVERY = 16
"""One in so many buckets that hold names is measured. Names are hashes, so buckets are alike."""

MODEL_HASH_BYTES = 8
_CLUSTER_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def key_prefix(cluster: str, shard: int = 0, *, model: str = "") -> str:
    """Return the prefix of all keys of a cluster, or of one model's index where `model` is not empty.

    Each shard has its own, so that a server read at another position than it is written at answers that no worker is
    there. A model's name may have any characters, so its hash stands for it. Raises ValueError for a cluster's name
    that would not be safe inside a key.
    """
    if not _CLUSTER_NAME.fullmatch(cluster):
        raise ValueError(f"cluster name must match {_CLUSTER_NAME.pattern}, got {cluster!r}")
    of_model = f"model-{blake2b(model.encode(), digest_size=MODEL_HASH_BYTES).hexdigest()}:" if model else ""
    return f"blockyard:{cluster}:v{SCHEMA_VERSION}:" + of_model + (f"shard-{shard}:" if shard else "")


def identity(worker_id: str, incarnation: str) -> str:
    """Return the name of one incarnation of a worker in `names` and `identities`."""
    return f"{worker_id}\0{incarnation}"


def pack_names(names: Iterable[bytes]) -> bytes:
    """Join the first 8 bytes of each name into one argument: Redis parses one string, not one for each block."""
    return b"".join([name[:INDEXED_NAME_BYTES] for name in names])


def bucket_of(name: bytes) -> int:
    return name[0] << 4 | name[1] >> 4


def pack_berths(berths: Iterable[int]) -> bytes:
    ordered = sorted(berths)
    return struct.pack(f"<{len(ordered)}H", *ordered)
