"""Names of blocks are chained, salted, and the same on every machine."""

import pytest
from blockyard.proto.naming.block_hash import chain, pack_tokens, root_name, split_names, unpack_tokens

from tests.counted_work import lines_run

FIELDS = {"cluster_secret": "s", "model_fingerprint": "m", "block_size": 16, "kv_dtype": "float32"}


def test_names_are_fixed_by_the_contract() -> None:
    root = root_name(cluster_secret="", model_fingerprint="m", block_size=16, kv_dtype="float16")
    assert root.hex() == "a6ff90dd1a1fa965b062778c29353117"
    assert [name.hex() for name in chain(root, range(32), 16)] == [
        "e9428fa17ab135c9dc9005aa15a029c0",
        "e6a0bfafde3ad1e813cfca9efe3bd58a",
    ]


def test_every_field_of_the_root_counts_and_none_is_taken_for_another() -> None:
    changes = [
        *({}, {"cluster_secret": "t"}, {"model_fingerprint": "n"}, {"block_size": 32}, {"kv_dtype": "int8"}),
        *({"adapter": "x"}, {"salt": "x"}, {"adapter": "x", "salt": "x"}),
        *({"adapter": "a", "salt": "b"}, {"adapter": "b", "salt": "a"}),
        *({"adapter": "asalt"}, {"adapter": "a", "salt": "salt"}),
    ]
    assert len({root_name(**(FIELDS | change)) for change in changes}) == len(changes)  # type: ignore[arg-type]


def test_only_full_blocks_have_names_and_a_prefix_has_a_prefix_of_names() -> None:
    root = root_name(**FIELDS)
    names = chain(root, range(100), 16)
    assert len(names) == 6
    assert chain(root, range(50), 16) == names[:3]
    assert chain(root, range(15), 16) == []
    assert chain(names[2], list(range(48, 100)), 16) == names[3:]


def test_packed_tokens_give_the_same_names() -> None:
    root = root_name(**FIELDS)
    assert chain(root, pack_tokens(range(64)), 16) == chain(root, range(64), 16)
    assert unpack_tokens(pack_tokens([0, 1, 2**31 - 1])) == [0, 1, 2**31 - 1]
    assert pack_tokens([1, 256]) == b"\x01\0\0\0\0\x01\0\0"


def test_broken_runs_of_bytes_are_value_errors() -> None:
    with pytest.raises(ValueError, match="multiple"):
        unpack_tokens(b"abc")
    with pytest.raises(ValueError, match="16 bytes each"):
        split_names(b"short")


def test_naming_blocks_takes_few_lines_for_each() -> None:
    root = root_name(**FIELDS)
    few, many = (lines_run(lambda n=n: chain(root, pack_tokens(range(16 * n)), 16)) for n in (128, 256))  # type: ignore[misc]
    print(f"naming 256 blocks: {many} lines of Python")
    assert many - few <= 5 * 128
